"""The prompts of the public sets, as they are asked, and the order in which models answer them."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.public_data import public

Set = Literal["humaneval", "gsm8k", "mt-bench"]
MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2-135m")
FILES: dict[Set, str] = {
    "humaneval": "humaneval_164.jsonl.gz",
    "gsm8k": "gsm8k_train_500.jsonl.gz",
    "mt-bench": "mt_bench_80.jsonl.gz",
}
MAX_TOKENS: dict[Set, int] = {"humaneval": 512, "gsm8k": 400, "mt-bench": 400}
EARLY_ROUNDS = 8
"""All programming tasks and 100 of arithmetic, by turns."""
TALK = 60
"""Prompts of MT-bench that are asked."""
CODE = "Write a complete Python program for this task, in one block of code:\n```python\n{}\n```"
NUMBER = '{}\nReason step by step. Then write the final number in a last line that begins with "Answer:".'


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt. shown: what the set says, from which `text` is made. tests: a program; answer: a number; empty if unknown."""

    id: str
    set: Set
    text: str
    shown: str
    tests: str = ""
    answer: str = ""


def tasks(name: Set) -> list[Task]:
    """All tasks of a set, in its order.

    Raises:
        DataMissing: Its file does not exist.
    """
    with gzip.open(public(f"prompts/{FILES[name]}"), "rt") as lines:
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    match name:
        case "humaneval":
            return [_code(row) for row in rows]
        case "gsm8k":
            return [
                Task(row["prompt_id"], name, NUMBER.format(row["prompt"]), row["prompt"], answer=row["answer"])
                for row in rows
            ]
        case "mt-bench":
            stride = len(rows) / TALK  # of every category alike
            chosen = [rows[int(i * stride)] for i in range(TALK)]
            return [Task(row["prompt_id"], name, row["turns"][0], row["turns"][0]) for row in chosen]


def _code(row: dict[str, Any]) -> Task:
    shown = row["prompt"]
    tests = f"{row['test']}\ncheck({row['entry_point']})\n"
    return Task(row["prompt_id"], "humaneval", CODE.format(shown.rstrip()), shown, tests=tests)


def rounds() -> Iterator[list[Task]]:
    """All tasks, in the order in which every model answers them: early rounds suffice for first figures."""
    code, numbers = tasks("humaneval"), tasks("gsm8k")
    for part in range(EARLY_ROUNDS // 2):
        yield code[part :: EARLY_ROUNDS // 2]
        yield numbers[25 * part : 25 * (part + 1)]
    yield tasks("mt-bench")
    for first in range(100, len(numbers), 100):
        yield numbers[first : first + 100]
