"""Prompts with known answers, and whether a reply is right."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.client.types import Prompt
from penstock.question_files.errors import FileError

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
TOOL_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt: one message, or the messages of a chat. answer: None if it is unknown. task, level: for reports."""

    prompt: Prompt
    answer: str | None = None
    task: str = ""
    level: int = 0

    @property
    def text(self) -> str:
        """The last message."""
        last = self.prompt if isinstance(self.prompt, str) else self.prompt[-1]
        return last if isinstance(last, str) else str(last["content"])  # type: ignore[index]

    def answered_by(self, reply: str) -> bool:
        """Whether a reply gives the answer: JSON objects and tool calls are compared by value, a number with the reply's last
        one, everything else by text."""
        if self.answer is None:
            return False
        if expected := _json_object(self.answer):
            return _json_object(reply) == expected
        if _NUMBER.fullmatch(self.answer.strip()) and (numbers := _NUMBER.findall(final_answer(reply))):
            return _value(numbers[-1]) == _value(self.answer)
        return final_answer(reply) == final_answer(self.answer)


def _value(number: str) -> float:
    return float(number.strip().replace(",", ""))


def final_answer(text: str) -> str:
    """The text after the last `Answer:`, or all of it without one; stripped."""
    return text.rsplit("Answer:", 1)[-1].strip()


def read_questions(path: Path, least: int = 1) -> list[Question]:
    """Read a JSONL file with `prompt` or `messages` in each line and, if known, `answer`, `task` and `level`.

    Raises:
        FileError: It cannot be read, a line is bad, or there are fewer than `least` lines.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: {error}") from None
    questions = []
    for number, line in enumerate(lines, start=1):
        try:
            questions.append(_question(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise FileError(f"{path}:{number}: {error}") from None
    if len(questions) < least:
        count = f"{len(questions)} prompts, fewer than {least}" if questions else "no prompts"
        raise FileError(f"{path}: {count}")
    return questions


def _question(row: Any) -> Question:
    if not isinstance(row, dict):
        raise ValueError("must be a JSON object")
    if "prompt" not in row and "messages" not in row:
        raise ValueError("prompt is missing")
    prompt: Prompt = str(row["prompt"]) if "prompt" in row else _messages(row["messages"])
    answer = str(row["answer"]) if row.get("answer") is not None else None
    return Question(prompt, answer, str(row.get("task", "")), int(row.get("level", 0)))


def _messages(value: Any) -> Sequence[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError("messages: must be a list of at least one message")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"messages[{i}]: must be an object with role and content")
    return value


def _json_object(text: str) -> tuple[bool, dict[str, Any]] | None:
    """(whether it is a tool call, its object); None if it is no JSON object."""
    begin, end = TOOL_CALL
    stripped = text.strip()
    is_call = stripped.startswith(begin) and stripped.endswith(end)
    try:
        value = json.loads(stripped.removeprefix(begin).removesuffix(end) if is_call else stripped)
    except ValueError:
        return None
    return (is_call, value) if isinstance(value, dict) else None
