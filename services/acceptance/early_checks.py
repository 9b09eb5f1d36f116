"""Early checks: unfinished answers are scored, and rejected if they score too low. No I/O.

Planning fits them to a stated error: the share of the answers that would be accepted and are rejected before they are
finished. It is spent evenly over the checks. For each, the limit is that order statistic of the scores of accepted answers
below which a further one falls with at most its part of the error, whatever the scores' distribution (split conformal
prediction; Vovk et al. 2005); by the union bound the checks together reject at most the error, on average over samples to
fit. It needs accepted answers like those to come, and as many that a part of the error is at least one of them: else a check
rejects nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from penstock.services.acceptance.rule import AcceptanceRule
from penstock.services.domain.errors import invalid
from penstock.types.planning import PlanOptions
from penstock.types.problems import FieldProblem
from penstock.types.rules import MAX_EARLY_CHECKS, EarlyCheck, PlannedEarlyChecks, RuleOptions

if TYPE_CHECKING:
    from penstock.services.acceptance.arrays import Bools, Floats, Ints
    from penstock.services.acceptance.judged import JudgedSample

NEEDS_PARTS = "needs scores of unfinished answers in the quality file: see measure --early-after"


def next_check(checks: Sequence[EarlyCheck], tokens: int, done: int) -> int | None:
    """Index of the check that is due for an answer of so many tokens; None if there is none.

    done: checks that have been made or passed over. If several are due, all but the last are passed over: a longer part
    of the answer says more.
    """
    due = [i for i in range(done, len(checks)) if checks[i].after_tokens <= tokens]
    return due[-1] if due else None


def rejected_early(check: EarlyCheck, score: float | None) -> bool:
    """Whether the answer is rejected. score: of its beginning; None if it could not be scored, which rejects nothing."""
    return score is not None and score < check.reject_below


def fit_early_checks(
    after_tokens: Sequence[int], part_scores: "Floats", accepted: "Bools", error: float
) -> tuple[EarlyCheck, ...]:
    """The checks of one tier. after_tokens (K), ascending. part_scores (N, K): of the first so many tokens of N answers;
    NaN where an answer has no more than these. accepted (N): those that are accepted when they are finished.

    Checks that would reject nothing are left out.

    Raises:
        InvalidRequest: Shapes that do not fit, an error that is none, or too many checks.
    """
    import numpy as np

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

    rejected: "Bools"
    tokens: "Ints"
    parts: "Ints"


def checked_answers(
    rule: PlannedEarlyChecks, after_tokens: Sequence[int], part_scores: "Floats", output_tokens: "Ints"
) -> CheckedAnswers:
    """What routers do: a part is scored while the answer grows, checks that come due meanwhile are passed over but for the
    last, and an answer that ends before its verdict is not rejected.

    part_scores (N, K): of the first after_tokens (K) tokens; what is scored later than a check is due has the check's score.
    output_tokens (N): of whole answers.
    """
    import numpy as np

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


class EarlyChecks(AcceptanceRule):
    """Unfinished answers are rejected. Planning fits the checks to the thresholds of a plan: see `planner_service.rules`."""

    field = "early_checks"
    options = ("early_error",)
    question = "early_error: 0.01  # early checks, which may reject this share of the answers that would be accepted"
    chosen = False

    def problems(self, value: Sequence[EarlyCheck], path: str) -> Iterator[FieldProblem]:
        if len(value) > MAX_EARLY_CHECKS:
            yield FieldProblem(path, f"at most {MAX_EARLY_CHECKS} checks, not {len(value)}")
        elif any(one.after_tokens >= other.after_tokens for one, other in pairwise(value)):
            yield FieldProblem(path, "after_tokens must ascend")

    def unfit(
        self, values: Sequence[Any], judged: "JudgedSample", requests: "JudgedSample", drawn: PlanOptions
    ) -> FieldProblem | None:
        if judged.parts is not None and requests.parts is None:
            return FieldProblem("lengths", "answers with the lengths of the trace have no early_checks")
        known = judged.parts.after_tokens if judged.parts is not None else ()
        for i, checks in enumerate(values):
            for j, check in enumerate(checks):
                if check.after_tokens not in known:
                    field = f"deployment.tiers[{i}].early_checks[{j}].after_tokens"
                    return FieldProblem(field, f"{check.after_tokens} is none of quality.early_after_tokens")
        return None

    def under(self, answers: "JudgedSample", value: Sequence[PlannedEarlyChecks]) -> "JudgedSample":
        """What is rejected has only the tokens that are generated until its verdict."""
        import numpy as np

        self.check_count(answers, value)
        if not any(rule.checks for rule in value):
            return answers
        if answers.parts is None:
            raise invalid("early_checks", "need scores of unfinished answers, which these prompts do not have")
        if answers.rejected_early is not None:
            raise ValueError("answers were cut already")
        after = answers.parts.after_tokens
        if unknown := sorted({check.after_tokens for rule in value for check in rule.checks} - set(after)):
            raise invalid("early_checks", f"no scores of answers after {', '.join(map(str, unknown))} tokens")
        rejected, output_tokens = np.zeros(answers.scores.shape, np.bool_), answers.output_tokens.copy()
        for tier, rule in enumerate(value):
            checked = checked_answers(rule, after, answers.parts.scores[:, tier], answers.output_tokens[:, tier])
            rejected[:, tier], output_tokens[:, tier] = checked.rejected, checked.tokens
        return replace(answers, output_tokens=output_tokens, rejected_early=rejected)

    def served(self, planned: PlannedEarlyChecks | None) -> tuple[EarlyCheck, ...] | None:
        return None if planned is None else planned.checks

    def in_mesh_file(self, value: object) -> None:
        """Nothing: they were fitted to a judge."""

    def lines(self, plan: Any, question: RuleOptions | None) -> list[str]:
        if question is None:  # a plan that is served does not tell what they do
            return []
        if plan.early_reason:
            return [f"early checks: {plan.early_reason}"]
        return [
            _line(tier.name, tier.early_checks) for tier in plan.tiers if tier.early_checks and tier.early_checks.checks
        ]


def _line(tier: str, early: PlannedEarlyChecks) -> str:
    limits = ", ".join(f"below {check.reject_below:.3g} after {check.after_tokens}" for check in early.checks)
    shares = ["no" if share is None else f"{share:.1%}" for share in (early.rejected, early.error)]
    return (
        f"early checks of {tier}: {limits} tokens; of the answers to reject they end {shares[0]} early, "
        f"{shares[1]} of those to accept; {early.saved:.0%} fewer tokens, {early.scored:.2g} parts scored per answer"
    )
