"""JSON of clients, parsed within limits, and JSON for them. No I/O.

The parser holds the GIL, so the size of its result is limited before it starts: the event loop is never blocked for long.
"""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticSerializationError, from_json, to_json

from penstock.services.domain.errors import InvalidRequest, invalid
from penstock.types.problems import FieldProblem, shortened
from penstock.types.prompts import MAX_PROMPT_TOKENS

MAX_NODES = 65_536
"""Objects, lists and keys of one body together. 4,096 messages have under 20,000."""
MAX_STRINGS = 2 * MAX_NODES
MAX_VALUES = MAX_PROMPT_TOKENS + MAX_NODES
MAX_KEYS = 64
"""Of one object."""
MAX_SCHEMA_KEYS = 1_024
"""Of one object in a field that holds JSON schemas."""
SCHEMA_FIELDS = frozenset({"tools", "response_format", "structured_outputs", "guided_json", "text"})


class StrictModel(BaseModel):
    """An object of a request's body: unknown fields are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    def problems(self) -> Iterator[FieldProblem]:
        """What is wrong with fields that are valid by themselves; for bodies, not for what they contain."""
        return iter(())


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. If a key occurs twice, its last value counts.

    Raises:
        InvalidRequest: It is not a JSON object in UTF-8, or has too many or too deeply nested values (200 levels).
    """
    _check_structure(body)
    try:
        content = from_json(body)
    except ValueError as error:
        raise invalid("body", f"is not JSON: {shortened(str(error), 200)}") from None
    if not isinstance(content, dict):
        raise invalid("body", "must be a JSON object")
    return content


def json_bytes(value: object) -> bytes:
    """A value as JSON in UTF-8; by a compiled encoder, in a fifth of the time of `json`."""
    try:
        return to_json(value)
    except PydanticSerializationError:  # a text has half of a surrogate pair, which `json` writes as an escape
        return json.dumps(value).encode()


def _check_structure(body: bytes) -> None:
    """Refuse bodies that would take long to parse, by counting bytes; those in strings are excluded if there are many."""
    if _crowded(body) is None and body.count(b'"') <= 2 * MAX_STRINGS:
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now a quotation mark begins or ends a string
    if unescaped.count(b'"') > 2 * MAX_STRINGS:
        raise invalid("body", f"at most {MAX_STRINGS} strings together")
    if (problem := _crowded(b"".join(unescaped.split(b'"')[::2]))) is not None:
        raise problem


def _crowded(structure: bytes) -> InvalidRequest | None:
    """The problem with the structure of a body, given without its strings; None if there is none."""
    if sum(structure.count(token) for token in (b"[", b"{", b":")) > MAX_NODES:
        return invalid("body", f"at most {MAX_NODES} objects, lists and keys together")
    if structure.count(b",") > MAX_VALUES:
        return invalid("body", f"at most {MAX_VALUES} values together")
    return None


def check_keys(content: dict[str, Any], body: bytes) -> None:
    """Refuse objects with more keys than any valid request has, before an error could name each.

    body: that `content` was parsed from.

    Raises:
        InvalidRequest: Names the object.
    """
    if body.count(b":") <= MAX_KEYS:
        return
    left: list[tuple[str, Any]] = [("", content)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            limit = MAX_SCHEMA_KEYS if _top(path) in SCHEMA_FIELDS else MAX_KEYS
            if len(value) > limit:
                raise invalid(path.lstrip(".") or "body", f"at most {limit} keys, not {len(value)}")
            left += [(f"{path}.{shortened(k, 40)}", v) for k, v in value.items() if isinstance(v, (dict, list))]
        else:
            left += [(f"{path}[{i}]", v) for i, v in enumerate(value) if isinstance(v, (dict, list))]


def _top(path: str) -> str:
    """The field of the body that a path begins with."""
    return path.lstrip(".").partition(".")[0].partition("[")[0]
