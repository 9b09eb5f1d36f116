"""The names that clients know fields by, in problems of requests and in errors of workers."""

import re
from collections.abc import Container, Iterator, Mapping

from pydantic import ValidationError

from penstock.services.domain.errors import InvalidRequest
from penstock.types.problems import FieldProblem


def problems_of(error: ValidationError) -> list[FieldProblem]:
    """The problems of a validation error, with the client's field names. Linear in its length, which fail_fast bounds."""
    by_path: dict[tuple[str | int, ...], list[str]] = {}
    for fault in error.errors(include_url=False, include_input=False):
        # a union adds the names of its branches to the location: they are types, not fields
        path = tuple(p for p in fault["loc"] if not (isinstance(p, str) and ("[" in p or p in _BRANCHES)))
        if path[:1] == ("response_format",):  # followed by the tag of the branch
            path = path[:1] + path[2:]
        problem = "is not supported here" if fault["type"] == "extra_forbidden" else fault["msg"]
        if problem not in by_path.setdefault(path, []):
            by_path[path].append(problem)
    # of the branches of a union, the one with the longest path is the most specific
    vague = {path[:end] for path in by_path for end in range(len(path))}
    return [FieldProblem(_name(path), "; or ".join(texts)) for path, texts in by_path.items() if path not in vague]


def _name(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "body"


_ITEMS = frozenset({"MessageItem", "CallItem", "CallOutputItem", "ReasoningItem"})
_BRANCHES = _ITEMS | {"str", "constrained-str", "MeshSloClass", "int", "bool", "float"}

_NAMES = {
    "prompt.chat.tool_use.choice.function": "tool_choice.function.name",
    "prompt.chat.tool_use.choice": "tool_choice",
    "prompt.chat.tool_use.": "",
    "prompt.chat.thinking": "chat_template_kwargs.enable_thinking",
    "prompt.chat.": "",
    "prompt.text": "prompt",
    "prompt.token_ids.ids": "prompt",
    "token_ids": "tokens",
    "sampling.": "",
    "slo.name": "slo",
}

_OF_FUNCTIONS = re.compile(r"(tools\[\d+\]|tool_calls\[\d+\])\.(name|parameters|arguments)")


def renamed_field(field: str, names: Mapping[str, str], whole: Container[str] = ()) -> str:
    """A field with the client's name for its beginning. whole: names that mean all that is below, too."""
    for ours, theirs in names.items():
        if field.startswith(ours):
            return theirs if theirs in whole else theirs + field.removeprefix(ours)
    return field


def renamed_problems(problems: Iterator[FieldProblem]) -> Iterator[FieldProblem]:
    """Problems with our field names, with OpenAI's names."""
    for problem in problems:
        field = _OF_FUNCTIONS.sub(r"\1.function.\2", renamed_field(problem.field, _NAMES))
        yield FieldProblem(field, problem.problem)


def renamed(error: InvalidRequest) -> InvalidRequest:
    """An error with our field names, such as a worker's, with OpenAI's names."""
    return type(error)(*renamed_problems(iter(error.problems)))
