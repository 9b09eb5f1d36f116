"""What makes an answer worthless whatever a scorer would say of it. No I/O."""

from judge_service.scorers import JudgedAnswer

EMPTY = "empty_answer"


def objection(item: JudgedAnswer) -> str | None:
    """Why an answer scores 0 without being shown to a scorer; None where it has to be scored."""
    return EMPTY if not item.answer.strip() else None
