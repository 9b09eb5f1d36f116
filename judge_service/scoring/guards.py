"""Answers that score 0 without being passed to a scorer. No I/O."""

import enum

from penstock.judge_service.scoring.repetition import is_repetitive
from penstock.services.tool_calls.checks import reply_objection
from penstock.types.judging import JudgedAnswer
from penstock.types.replies import FinishReason


class Guard(enum.Enum):
    """The guards that a mesh file may turn off. Empty answers and answers of a wrong form always score 0."""

    TRUNCATED = "truncated"
    REPEATED = "repeated"


ALL_GUARDS = frozenset(Guard)


def objection(item: JudgedAnswer, guards: frozenset[Guard] = ALL_GUARDS) -> str | None:
    """The reason why an answer scores 0 without a scorer; None if it must be scored."""
    if not item.answer.strip():
        return "empty_answer"
    reason = reply_objection(item.answer, item.prompt, item.tool_format, item.structured_output)
    if reason is not None:
        return reason
    if Guard.TRUNCATED in guards and item.finish_reason is FinishReason.LENGTH:
        return "truncated_answer"
    if Guard.REPEATED in guards and is_repetitive(item.answer):
        return "repeated_answer"
    return None
