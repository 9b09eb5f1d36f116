"""When unfinished answers are scored, and which of them are rejected. No I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.domain.errors import FieldProblem

MAX_EARLY_CHECKS = 16
MAX_TOKENS = 2**31 - 1  # of an answer: what messages can hold


@dataclass(frozen=True, slots=True)
class EarlyCheck:
    """An answer that has `after_tokens` tokens and is not finished is rejected if its score, 0 to 100, is below
    `reject_below`."""

    after_tokens: int
    reject_below: float


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


def early_check_problems(checks: Sequence[EarlyCheck], path: str) -> Iterator[FieldProblem]:
    if len(checks) > MAX_EARLY_CHECKS:
        yield FieldProblem(path, f"at most {MAX_EARLY_CHECKS} checks, not {len(checks)}")
        return
    for i, check in enumerate(checks):
        if not 1 <= check.after_tokens <= MAX_TOKENS:
            problem = f"must be from 1 to {MAX_TOKENS:,}, not {check.after_tokens:,}"
            yield FieldProblem(f"{path}[{i}].after_tokens", problem)
        if not 0 <= check.reject_below <= 100:
            yield FieldProblem(f"{path}[{i}].reject_below", f"must be from 0 to 100, not {check.reject_below}")
    if any(one.after_tokens >= other.after_tokens for one, other in pairwise(checks)):
        yield FieldProblem(path, "after_tokens must ascend")
