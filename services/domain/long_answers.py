"""Long answers that are accepted from a lower score on. No I/O.

A tier's long answer took long, and its request takes longest if it escalates: a long answer of one tier is mostly a long one
of the next. So where latency or rate count, the same mean quality is cheaper with fewer long answers that escalate and more
short ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.domain.early_checks import MAX_TOKENS
from services.domain.errors import FieldProblem


@dataclass(frozen=True, slots=True)
class LongAnswers:
    """Answers of at least `from_tokens` output tokens are accepted if they score at least `threshold`, 0 to 100."""

    from_tokens: int
    threshold: float


def long_threshold(rule: LongAnswers | None, output_tokens: int) -> float | None:
    """The score from which on an answer of so many tokens is accepted as a long one; None if it is none."""
    return rule.threshold if rule is not None and output_tokens >= rule.from_tokens else None


def stands_by_length(rule: LongAnswers | None, output_tokens: int, score: float) -> bool:
    """Whether an answer is accepted because it is long, whatever the tier's own threshold."""
    threshold = long_threshold(rule, output_tokens)
    return threshold is not None and score >= threshold


def long_answers_problems(rule: LongAnswers, path: str) -> Iterator[FieldProblem]:
    if not 1 <= rule.from_tokens <= MAX_TOKENS:
        yield FieldProblem(f"{path}.from_tokens", f"must be from 1 to {MAX_TOKENS:,}, not {rule.from_tokens:,}")
    if not 0 <= rule.threshold <= 100:
        yield FieldProblem(f"{path}.threshold", f"must be from 0 to 100, not {rule.threshold}")
