"""Answers that score 0 without being passed to a scorer. No I/O."""

from judge_service.scorers import JudgedAnswer
from services.domain.requests import ChatPrompt
from services.domain.tools import NO_TOOLS
from services.tool_calls import reply_objection

EMPTY = "empty_answer"


def objection(item: JudgedAnswer) -> str | None:
    """The reason why an answer scores 0 without a scorer; None if it must be scored."""
    if not item.answer.strip():
        return EMPTY
    tool_use = item.prompt.tool_use if isinstance(item.prompt, ChatPrompt) else NO_TOOLS
    return reply_objection(item.answer, tool_use, item.tool_format, item.structured_output)
