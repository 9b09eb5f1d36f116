"""JSON from outside, read within limits. No I/O.

The parser holds the GIL: what it may build is bounded before it begins, so that the event loop is never held up for long.
"""

import re
from typing import Any

from pydantic_core import from_json

from services.domain.errors import invalid, shortened

MAX_NODES = 65_536
"""Objects, lists and keys of one body together. 4,096 messages have under 20,000."""
MAX_KEYS = 64
"""Of one object."""

# A string (to be passed over whole) or the beginning of a node.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{:]', re.DOTALL)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` is. Of a key that stands twice, the last value counts.

    Raises:
        InvalidRequest: it is no JSON object in UTF-8, or too many or too deeply nested values (200 levels).
    """
    if _nodes_exceed(body, MAX_NODES):
        raise invalid("body", f"at most {MAX_NODES} objects, lists and keys together")
    try:
        content = from_json(body)
    except ValueError as error:
        raise invalid("body", f"is not JSON: {shortened(str(error), 200)}") from None
    if not isinstance(content, dict):
        raise invalid("body", "must be a JSON object")
    _check_keys(content)
    return content


def _nodes_exceed(body: bytes, limit: int) -> bool:
    """Whether more nodes begin in `body` than `limit`. Only a body that may have them is looked at string by string."""
    if sum(body.count(token) for token in (b"[", b"{", b":")) <= limit:
        return False
    found = 0
    for match in _TOKEN.finditer(body):
        if body[match.start()] != 0x22:  # a quotation mark
            found += 1
            if found > limit:
                return True
    return False


def _check_keys(content: dict[str, Any]) -> None:
    """Refuse objects with more keys than any request has, before a report could name each."""
    left: list[tuple[str, Any]] = [("", content)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            if len(value) > MAX_KEYS:
                raise invalid(path.lstrip(".") or "body", f"at most {MAX_KEYS} keys, not {len(value)}")
            left += [(f"{path}.{shortened(k, 40)}", v) for k, v in value.items() if isinstance(v, (dict, list))]
        else:
            left += [(f"{path}[{i}]", v) for i, v in enumerate(value) if isinstance(v, (dict, list))]
