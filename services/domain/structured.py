"""Structured output: the form that a reply must have, and the limits of what may be asked for. No I/O."""

import enum
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.domain.errors import FieldProblem

# Limits are checked before anything is compiled, by length and depth alone.
MAX_SCHEMA_CHARS = 65_536
"""Of a JSON schema as text: a hundred properties with long descriptions have half of it."""
MAX_SCHEMA_DEPTH = 64
"""Nested objects and lists of a schema's text: twice the depth of a value, since each level of properties is two."""
MAX_GRAMMAR_CHARS = 65_536
MAX_GBNF_RULES = 256
"""Of a grammar in GBNF, whose translation takes time by the square of them: 0.1 s for so many."""
MAX_REGEX_CHARS = 8_192
MAX_CHOICES = 1_024
MAX_CHOICE_CHARS = 65_536
"""Of all choices together."""


_BRACKETS = re.compile(r"[\[\]{}]")


class StructureKind(enum.Enum):
    """How a form is described.

    JSON_OBJECT: any JSON object. JSON_SCHEMA: JSON that fits a schema. REGEX: the whole reply matches.
    GRAMMAR: context-free, in Lark's or GBNF's notation. CHOICE: one of several texts.
    """

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of a reply.

    text: the schema as JSON text, the regular expression or the grammar; empty for the other kinds.
    choices: of CHOICE.
    """

    kind: StructureKind
    text: str = ""
    choices: tuple[str, ...] = ()

    def problems(self, path: str) -> Iterator[FieldProblem]:
        """What is wrong with it, by its size and notation; whether it can be compiled is found out by the worker."""
        name = f"{path}.{self.kind.value}"
        match self.kind:
            case StructureKind.JSON_SCHEMA:
                yield from schema_problems(self.text, name)
            case StructureKind.REGEX:
                yield from _length_problems(self.text, MAX_REGEX_CHARS, name)
            case StructureKind.GRAMMAR:
                yield from _length_problems(self.text, MAX_GRAMMAR_CHARS, name)
                if self.text.count("::=") > MAX_GBNF_RULES:
                    yield FieldProblem(name, f"must have at most {MAX_GBNF_RULES} rules")
            case StructureKind.CHOICE:
                yield from _choice_problems(self.choices, name)


def schema_problems(text: str, path: str) -> Iterator[FieldProblem]:
    """What is wrong with a JSON schema as text: its length, its depth, or that it is no JSON object."""
    problem = None
    if len(text) > MAX_SCHEMA_CHARS:
        problem = f"must have at most {MAX_SCHEMA_CHARS} characters as JSON, not {len(text)}"
    elif json_depth(text) > MAX_SCHEMA_DEPTH:
        problem = f"must be nested at most {MAX_SCHEMA_DEPTH} deep"
    else:
        try:
            if not isinstance(json.loads(text), dict):
                problem = "must be a JSON object"
        except ValueError:
            problem = "must be JSON"
    if problem is not None:
        yield FieldProblem(path, problem)


def json_depth(text: str) -> int:
    """Greatest number of objects and lists around a place in a JSON text; linear in its length."""
    depth = deepest = 0
    for part in text.replace("\\\\", "").replace('\\"', "").split('"')[::2]:  # what stands outside strings
        for bracket in _BRACKETS.findall(part):
            depth += 1 if bracket in "[{" else -1
            deepest = max(deepest, depth)
    return deepest


def _length_problems(text: str, limit: int, path: str) -> Iterator[FieldProblem]:
    if not 1 <= len(text) <= limit:
        yield FieldProblem(path, f"must have 1 to {limit} characters, not {len(text)}")


def _choice_problems(choices: Sequence[str], path: str) -> Iterator[FieldProblem]:
    if not 1 <= len(choices) <= MAX_CHOICES:
        yield FieldProblem(path, f"1 to {MAX_CHOICES} choices are needed, not {len(choices)}")
    elif sum(map(len, choices)) > MAX_CHOICE_CHARS:
        yield FieldProblem(path, f"at most {MAX_CHOICE_CHARS} characters together")
    elif not all(choices):
        yield FieldProblem(path, "no choice may be empty")
