"""Whether a JSON value fits a JSON schema. No I/O.

The keywords that agents and grammars use are checked (JSON Schema 2020-12). Not checked, so never a reason to refuse:
`pattern`, `patternProperties`, `propertyNames`, `format`, `contains`, `dependent*`, `unevaluated*`, `if`, and references
other than to `#/...`. Patterns are left out because their run time has no bound.
"""

import math
from collections.abc import Mapping
from typing import Any

MAX_STEPS = 50_000
"""Comparisons of a value with a schema, or with a value in one: combinations of `anyOf`, references and long lists could take
forever. A step takes a microsecond or two."""
MAX_DEPTH = 192
"""Of nested values, references and combinations together: three times the depth of a value."""

MAX_EXACT = 2.0**53
"""Above it, not every integer is a float, and multiples cannot be told."""

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


class SchemaTooComplex(Exception):
    """A value could not be compared with its schema within MAX_STEPS and MAX_DEPTH."""


class Steps:
    """The steps that comparisons may take together."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def take(self, count: int = 1) -> None:
        """Raises:
        SchemaTooComplex: There are fewer left.
        """
        self._left -= count
        if self._left < 0:
            raise SchemaTooComplex(f"more than {MAX_STEPS} steps")


def fits(value: Any, schema: Any, steps: Steps | None = None) -> bool:
    """Whether a JSON value fits a schema, as far as the keywords above say. steps: of several comparisons; None: of this one.

    Raises:
        SchemaTooComplex: It takes too many steps to find out.
    """
    return _Check(schema, steps or Steps()).fits(value, schema, 0)


class _Check:
    """One comparison. depth: of calls around one."""

    def __init__(self, root: Any, steps: Steps) -> None:
        self._root, self._steps = root, steps

    def fits(self, value: Any, schema: Any, depth: int) -> bool:
        self._steps.take()
        if depth > MAX_DEPTH:
            raise SchemaTooComplex(f"nested more than {MAX_DEPTH} deep")
        if not isinstance(schema, Mapping):
            return schema is not False
        if not _of_type(value, schema.get("type")):
            return False
        if isinstance(schema.get("enum"), list) and not any(self._equal(value, one) for one in schema["enum"]):
            return False
        if "const" in schema and not self._equal(value, schema["const"]):
            return False
        if not self._fits_combinations(value, schema, depth):
            return False
        match value:
            case dict():
                return self._fits_object(value, schema, depth)
            case list():
                return self._fits_array(value, schema, depth)
            case str():
                return _within(len(value), schema, "minLength", "maxLength")
            case bool() | None:
                return True
            case int() | float():
                return _fits_number(value, schema)
        return True

    def _fits_combinations(self, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
        if isinstance(schema.get("$ref"), str) and not self._fits_reference(value, schema["$ref"], depth):
            return False
        for name, holds in (("allOf", all), ("anyOf", any), ("oneOf", lambda fitting: sum(fitting) == 1)):
            parts = _part(schema, name, list, None)
            if parts is not None and not holds(self.fits(value, part, depth + 1) for part in parts):
                return False
        return "not" not in schema or not self.fits(value, schema["not"], depth + 1)

    def _fits_reference(self, value: Any, reference: str, depth: int) -> bool:
        if not reference.startswith("#"):
            return True
        target = self._root
        self._steps.take(1 + len(reference) // 64)
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or name not in target:
                return True
            target = target[name]
        return self.fits(value, target, depth + 1)

    def _fits_object(self, value: dict[str, Any], schema: Mapping[str, Any], depth: int) -> bool:
        known = _part(schema, "properties", Mapping, {})
        required = _part(schema, "required", list, [])
        self._steps.take(len(required))
        if any(isinstance(key, str) and key not in value for key in required):
            return False
        if not _within(len(value), schema, "minProperties", "maxProperties"):
            return False
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(self.fits(item, known.get(key, others), depth + 1) for key, item in value.items())

    def _fits_array(self, value: list[Any], schema: Mapping[str, Any], depth: int) -> bool:
        if not _within(len(value), schema, "minItems", "maxItems"):
            return False
        if schema.get("uniqueItems") is True and self._has_equal_items(value):
            return False
        first = _part(schema, "prefixItems", list, [])
        others = schema.get("items", True)
        return all(self.fits(item, first[i] if i < len(first) else others, depth + 1) for i, item in enumerate(value))

    def _has_equal_items(self, value: list[Any]) -> bool:
        return any(self._equal(one, other) for i, one in enumerate(value) for other in value[:i])

    def _equal(self, one: Any, other: Any) -> bool:
        """Equality of JSON values: true is not 1, but 1.0 is."""
        self._steps.take()
        if isinstance(one, bool) or isinstance(other, bool):
            return one is other
        if isinstance(one, dict) and isinstance(other, dict):
            self._steps.take(len(one))
            return one.keys() == other.keys() and all(self._equal(item, other[key]) for key, item in one.items())
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(self._equal, one, other))
        return bool(one == other)


def _part(schema: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """The part of a schema with a name; the default if there is none, or it is of another kind."""
    part = schema.get(name)
    return part if isinstance(part, kind) else default


def _of_type(value: Any, types: Any) -> bool:
    if isinstance(types, str):
        types = [types]
    return not isinstance(types, list) or any(_is(value, one) for one in types)


def _is(value: Any, kind: Any) -> bool:
    if not isinstance(kind, str):
        return True
    if kind in ("integer", "number") and isinstance(value, bool):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))


def _number(schema: Mapping[str, Any], name: str) -> float | None:
    value = schema.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _within(value: float, schema: Mapping[str, Any], least: str, most: str) -> bool:
    low, high = _number(schema, least), _number(schema, most)
    return (low is None or value >= low) and (high is None or value <= high)


def _fits_number(value: float, schema: Mapping[str, Any]) -> bool:
    above, below = _number(schema, "exclusiveMinimum"), _number(schema, "exclusiveMaximum")
    step = _number(schema, "multipleOf")
    if (above is not None and value <= above) or (below is not None and value >= below):
        return False
    if step is not None and step > 0 and abs(value) < MAX_EXACT:
        quotient = value / step
        if math.isfinite(quotient) and not math.isclose(quotient, round(quotient), rel_tol=1e-9, abs_tol=1e-9):
            return False
    return _within(value, schema, "minimum", "maximum")
