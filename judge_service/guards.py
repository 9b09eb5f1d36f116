"""Answers that score 0 without being passed to a scorer. No I/O."""

from judge_service.scorers import JudgedAnswer

EMPTY = "empty_answer"


def objection(item: JudgedAnswer) -> str | None:
    """The reason why an answer scores 0 without a scorer; None if it must be scored."""
    return EMPTY if not item.answer.strip() else None
