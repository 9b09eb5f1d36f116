"""One problem: a chat up to the reply, the right reply, and how a reply is checked. No I/O."""

import json
import zlib
from dataclasses import dataclass

HELD_OUT_SHARE = 16  # one problem content in sixteen is never trained on
TOOL_CALL = ("<tool_call>\n", "\n</tool_call>")  # as Hermes and Qwen models write it


@dataclass(frozen=True, slots=True)
class Message:
    """role: system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """messages: the chat up to the reply. reply: the right one, with its working where the task shows any.

    answer: what a reply must end in (`Answer: ...` where there is working), or the JSON object or tool call that it must be.
    keys: names of the problem's content, one for each turn, independent of the wording and the order of operands that
    commute. wordings: the templates that its user messages were written with.
    """

    task: str
    level: int
    messages: tuple[Message, ...]
    reply: str
    answer: str
    keys: tuple[str, ...]
    wordings: tuple[str, ...]

    @property
    def key(self) -> str:
        return " & ".join(self.keys)

    @property
    def held_out(self) -> bool:
        """Whether any part of its content belongs to the held-out split."""
        return any(is_held_out(key) for key in self.keys)

    @property
    def prompt(self) -> str:
        """The last message's text."""
        return self.messages[-1].content


def is_held_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def final_answer(reply: str) -> str:
    """The text after the last `Answer:`, or the whole reply without one; stripped."""
    return reply.rsplit("Answer:", 1)[-1].strip()


def is_correct(answer: str, reply: str) -> bool:
    """Whether `reply` gives `answer`: JSON objects and tool calls are compared by value, everything else by text."""
    expected = _json_value(answer)
    if expected is not None:
        return _json_value(reply.strip()) == expected
    return final_answer(reply) == answer


def tool_call(name: str, **arguments: object) -> str:
    """A reply that calls a tool."""
    return json.dumps({"name": name, "arguments": arguments}).join(TOOL_CALL)


def _json_value(text: str) -> tuple[bool, dict[str, object]] | None:
    """(whether it is a tool call, its object), or None if it is no JSON object."""
    begin, end = TOOL_CALL
    called = text.startswith(begin.strip()) and text.endswith(end.strip())
    body = text[len(begin.strip()) : -len(end.strip())] if called else text
    if not body.strip().startswith("{"):
        return None
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return (called, value) if isinstance(value, dict) else None
