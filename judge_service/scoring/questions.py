"""What models that score are asked and shown. No I/O."""

from penstock.services.domain.errors import InvalidRequest, invalid
from penstock.services.tool_calls.rendering import plain_chat
from penstock.types.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt

Messages = list[dict[str, str]]

REPLY_TOKENS = 4
"""Room for a grade: a digit, possibly after `Grade:`."""
TOP_LOGPROBS = 10  # enough for the digits


def plain_prompt(prompt: Prompt, index: int) -> Messages:
    """A prompt as a chat for a template that knows no tools.

    Raises:
        InvalidRequest: It is given as tokens; names `items[index].prompt`.
    """
    match prompt:
        case ChatPrompt(messages):
            return plain_chat(messages)
        case TextPrompt(text):
            return [{"role": "user", "content": text}]
        case TokenPrompt():
            raise not_text(index)


def not_text(index: int) -> InvalidRequest:
    return invalid(f"items[{index}].prompt.token_ids", "this scorer reads text: send chat or text")
