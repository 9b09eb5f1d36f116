"""Structured output: the form that a reply must have, and the limits of what may be asked for."""

import enum
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from penstock.types.limits import AtMost
from penstock.types.problems import FieldProblem

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


class StructureKind(enum.StrEnum):
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
    """The form that a reply must have; exactly one field is set.

    json_object: any JSON object. json_schema: JSON that fits a schema, as text; it may be given as a mapping.
    regex: the whole reply matches. grammar: in Lark's notation, or GBNF. choice: one of these texts.
    """

    json_object: bool = False
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[tuple[str, ...], AtMost(MAX_CHOICES, "choices")] = ()

    if TYPE_CHECKING:

        def __init__(
            self,
            json_object: bool = False,
            json_schema: str | Mapping[str, Any] | None = None,
            regex: str | None = None,
            grammar: str | None = None,
            choice: tuple[str, ...] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        schema: str | Mapping[str, Any] | None = self.json_schema
        if isinstance(schema, Mapping):
            object.__setattr__(self, "json_schema", json_text(schema))

    @property
    def _given(self) -> list[StructureKind]:
        return [kind for kind in StructureKind if getattr(self, kind) not in (False, None, ())]

    @property
    def kind(self) -> StructureKind:
        """How the form is described."""
        return self._given[0]

    @property
    def text(self) -> str:
        """The schema, the regular expression or the grammar; empty for the other kinds."""
        return self.json_schema or self.regex or self.grammar or ""

    def problems(self, path: str) -> Iterator[FieldProblem]:
        """What is wrong with it, by its size and notation; whether it can be compiled is found out by the worker.

        Example:
            >>> [problem.field for problem in StructuredOutput(json_schema="{").problems("structured_output")]
            ['structured_output.json_schema']
        """
        given = self._given
        if len(given) != 1:
            yield FieldProblem(path, f"exactly one of {', '.join(StructureKind)} is needed, not {len(given)}")
            return
        name = f"{path}.{self.kind}"
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
                yield from _choice_problems(self.choice, name)


def json_text(schema: Mapping[str, Any]) -> str:
    """A JSON schema as text."""
    return json.dumps(schema, ensure_ascii=False)


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


def json_value(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is no JSON, or nested deeper than MAX_SCHEMA_DEPTH.
    """
    if json_depth(text) > MAX_SCHEMA_DEPTH:
        raise ValueError("nested too deep")
    return json.loads(text)


def json_depth(text: str) -> int:
    """Greatest number of objects and lists around a place in a JSON text; linear in its length."""
    depth = deepest = 0
    for part in text.replace("\\\\", "").replace('\\"', "").split('"')[::2]:  # what is outside strings
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
