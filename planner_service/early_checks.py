"""Fits early checks: below which score an unfinished answer is rejected, with a stated error. No I/O.

The error is the share of the answers that would be accepted and are rejected before they are finished. It is spent evenly
over the checks. For each, the limit is that order statistic of the scores of accepted answers below which a further one
falls with at most its part of the error, whatever the scores' distribution (split conformal prediction; Vovk et al. 2005);
by the union bound the checks together reject at most the error, on average over samples to fit. It needs accepted answers
like those to come, and as many that a part of the error is at least one of them: else a check rejects nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner_service.simulator.workload import Bools, Floats, Ints
from services.domain.early_checks import MAX_EARLY_CHECKS, EarlyCheck, next_check, rejected_early
from services.domain.errors import invalid


@dataclass(frozen=True, slots=True, eq=False)
class PartScores:
    """Scores of unfinished answers. after_tokens (K), ascending.

    scores (N, C, K): of the first so many tokens of each answer; NaN where it has no more, and where parts are not scored.
    """

    after_tokens: tuple[int, ...]
    scores: Floats

    def subset(self, rows: Ints) -> "PartScores":
        return PartScores(self.after_tokens, self.scores[rows])

    def only(self, tiers: Sequence[int]) -> "PartScores":
        return PartScores(self.after_tokens, self.scores[:, list(tiers)])


@dataclass(frozen=True, slots=True)
class EarlyRule:
    """Of one tier. checks: none, if the tier has none. meanwhile_tokens: that it generates while a part is scored."""

    checks: tuple[EarlyCheck, ...] = ()
    meanwhile_tokens: int = 0


def fit_early_checks(
    after_tokens: Sequence[int], part_scores: Floats, accepted: Bools, error: float
) -> tuple[EarlyCheck, ...]:
    """The checks of one tier. after_tokens (K), ascending. part_scores (N, K): of the first so many tokens of N answers;
    NaN where an answer has no more than these. accepted (N): those that stand when they are finished.

    Checks that would reject nothing are left out.

    Raises:
        InvalidRequest: Shapes that do not fit, an error that is none, or too many checks.
    """
    if part_scores.shape != (len(accepted), len(after_tokens)):
        raise invalid("part_scores", f"must have a row for each of {len(accepted)} answers and a column for each check")
    if not 0 < error < 1:
        raise invalid("error", f"must be over 0 and under 1, not {error:g}")
    if not 1 <= len(after_tokens) <= MAX_EARLY_CHECKS:
        raise invalid("after_tokens", f"1 to {MAX_EARLY_CHECKS} checks, not {len(after_tokens)}")
    checks = []
    good = int(accepted.sum())
    for k, tokens in enumerate(after_tokens):
        # an accepted answer that has ended before the check cannot be rejected by it: it counts as a score of infinity
        scores = np.sort(np.where(np.isnan(part_scores[accepted, k]), np.inf, part_scores[accepted, k]))
        rank = math.floor(
            error / len(after_tokens) * (good + 1)
        )  # P(a further one < the rank-th smallest) <= rank / (n + 1)
        if rank < 1:
            continue
        limit = min(100.0, float(scores[rank - 1]))
        if np.nan_to_num(part_scores[:, k], nan=np.inf).min(initial=np.inf) < limit:
            checks.append(EarlyCheck(tokens, limit))
    return tuple(checks)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedAnswers:
    """What early checks do to N answers of a tier. rejected (N). tokens (N): of each answer, at most until it is rejected.

    parts (N): that were scored.
    """

    rejected: Bools
    tokens: Ints
    parts: Ints


def checked_answers(
    rule: EarlyRule, after_tokens: Sequence[int], part_scores: Floats, output_tokens: Ints
) -> CheckedAnswers:
    """What routers do: a part is scored while the answer goes on, checks that come due meanwhile are passed over but for the
    last, and an answer that ends before its verdict is not rejected.

    part_scores (N, K): of the first after_tokens (K) tokens; what is scored later than a check is due has the check's score.
    output_tokens (N): of whole answers.
    """
    place = {tokens: k for k, tokens in enumerate(after_tokens)}
    rejected, tokens = np.zeros(len(output_tokens), np.bool_), output_tokens.copy()
    parts = np.zeros(len(output_tokens), np.int64)
    for i, (length, scores) in enumerate(zip(output_tokens.tolist(), part_scores.tolist(), strict=True)):
        done = at = 0
        while done < len(rule.checks) and (at := max(at, rule.checks[done].after_tokens)) < length:
            due = next_check(rule.checks, at, done)
            assert due is not None
            check, at, done = rule.checks[due], at + rule.meanwhile_tokens, due + 1
            score = scores[place[check.after_tokens]]
            parts[i] += 1
            if at < length and rejected_early(check, None if math.isnan(score) else score):
                rejected[i], tokens[i] = True, at
                break
    return CheckedAnswers(rejected, tokens, parts)
