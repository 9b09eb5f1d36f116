"""Common parts of the problem generators: drafts and random numbers. No I/O."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from models.training.problems import Message, Problem
from models.training.wording import Phrasing

Maker = Callable[[random.Random, int, Phrasing], "Draft"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A problem without its task's name. lines: working; empty if the reply is only the answer."""

    messages: tuple[Message, ...]
    lines: Seq[str]
    answer: str
    keys: tuple[str, ...]

    @property
    def reply(self) -> str:
        return "\n".join([*self.lines, f"Answer: {self.answer}"]) if self.lines else self.answer

    def named(self, task: str, level: int, wordings: Seq[str]) -> Problem:
        return Problem(task, level, self.messages, self.reply, self.answer, self.keys, tuple(wordings))


def asked(prompt: str, lines: Seq[str], answer: object, key: str) -> Draft:
    """A draft of one user message."""
    return Draft((Message("user", prompt),), lines, str(answer), (key,))


def number(rng: random.Random, digits: int) -> int:
    """A number of exactly `digits` digits; 0 counts as one."""
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def sorted_text(values: Seq[object]) -> str:
    """Values in canonical order: lists that differ only in their order share a key."""
    return ",".join(sorted(map(str, values)))
