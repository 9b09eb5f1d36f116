"""What makes an answer worthless whatever a scorer would say of it. No I/O."""

from judge_service.scorers import JudgedAnswer
from services.domain.requests import ChatPrompt
from services.domain.tools import NO_TOOLS
from services.tool_calls import reply_objection

EMPTY = "empty_answer"


def objection(item: JudgedAnswer) -> str | None:
    """Why an answer scores 0 without being shown to a scorer; None where it has to be scored."""
    if not item.answer.strip():
        return EMPTY
    tool_use = item.prompt.tool_use if isinstance(item.prompt, ChatPrompt) else NO_TOOLS
    return reply_objection(item.answer, tool_use, item.tool_format, item.structured_output)
