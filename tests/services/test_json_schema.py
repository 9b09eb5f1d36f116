"""Which JSON values fit a schema."""

from typing import Any

import pytest

from penstock.services.json_schema import MAX_STEPS, SchemaTooComplex, Steps, fits

TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["v"]}},
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, [1, 1.0, -3], [1.5, "1", True, None]),
        ({"type": ["string", "null"]}, ["", None], [0, []]),
        ({"type": "number"}, [1, 0.5], [True, "1"]),
        ({"type": "boolean"}, [True], [1, 0]),
        ({"enum": [1, "a"]}, [1, 1.0, "a"], [True, "b"]),
        ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [True]}, {"a": [1, 2]}, {}]),
        ({"minimum": 2, "exclusiveMaximum": 5}, [2, 4.9, "x"], [1, 5]),
        ({"maximum": 2, "exclusiveMinimum": 0}, [2, 0.1], [0, 3]),
        ({"multipleOf": 0.1}, [0.3, 1, 2**60], [0.25]),
        ({"multipleOf": 1e-320}, [5], []),
        ({"required": [[], {}, 1, "a"]}, [{"a": 1}], [{}]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "abc", 7], ["a", "abcd"]),
        ({"items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], ["a"], [1, 2, 3]]),
        ({"prefixItems": [{"type": "string"}], "items": False}, [["a"], []], [[1], ["a", 2]]),
        ({"uniqueItems": True}, [[1, "1", True], [[1], [2]]], [[1, 1.0], [{"a": 1}, {"a": 1}]]),
        ({"properties": {"a": {"type": "integer"}}}, [{"a": 1}, {"b": "x"}, 7], [{"a": "x"}]),
        ({"properties": {"a": {}}, "additionalProperties": False}, [{"a": 1}, {}], [{"b": 1}]),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, [{"a": 1, "b": "x"}], [{"b": 1}]),
        ({"patternProperties": {".": {}}, "additionalProperties": False}, [{"b": 1}], []),
        ({"required": ["a"], "minProperties": 2, "maxProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}, {"b": 1, "c": 2}]),
        ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, [2], [0, 4]),
        ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, ["x", 3], [2]),
        ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, [2, 3], [6, 1]),
        ({"not": {"type": "string"}}, [1], ["x"]),
        (TREE, [{"v": 1, "next": {"v": 2}}], [{"v": 1, "next": {}}, {}]),
        ({"$ref": "https://elsewhere"}, [1, "x"], []),
        ({"$ref": "#/$defs/none"}, [1], []),
        (True, [1], []),
        (False, [], [1, None]),
        ({"pattern": "^(a+)+$"}, ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"], []),
    ],
)
def test_values_fit_or_do_not(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not fits(value, schema)] == []
    assert [value for value in bad if fits(value, schema)] == []


def test_a_schema_cannot_take_forever() -> None:
    """Neither by references to itself, nor by combinations, nor by many items that must differ."""
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    doubling: dict[str, Any] = {"$defs": {"x0": False}}
    for i in range(1, 30):
        doubling["$defs"][f"x{i}"] = {"anyOf": [{"$ref": f"#/$defs/x{i - 1}"}] * 2}
    doubling["$ref"] = "#/$defs/x29"
    wide: dict[str, Any] = {"$defs": {"e": {"enum": [*range(20_000)]}}, "anyOf": [{"$ref": "#/$defs/e"}] * 45}
    long = {"const": [[1] * 1000] * 100}
    many = {"anyOf": [{"required": ["x"] * 10_000}] * 10}
    for value, schema in (
        (1, loop),
        (1, doubling),
        ([*range(100_000)], {"uniqueItems": True}),
        (-1, wide),
        (long["const"], long),
        ({"x": 1}, {"allOf": many["anyOf"]}),
        (1, {"allOf": [{"$ref": f"#/{'a' * 100_000}"}] * 40}),
    ):
        with pytest.raises(SchemaTooComplex):
            fits(value, schema)


def test_several_comparisons_share_their_steps() -> None:
    steps, schema = Steps(), {"enum": [*range(MAX_STEPS // 2)]}
    assert not fits(-1, schema, steps)
    with pytest.raises(SchemaTooComplex):
        fits(-1, schema, steps)
    assert not fits(-1, schema)


def test_a_value_as_deep_as_allowed_is_compared() -> None:
    value: Any = 1
    for _ in range(64):
        value = [value]
    assert fits(value, {"$ref": "#/$defs/l", "$defs": {"l": {"items": {"$ref": "#/$defs/l"}}}} | {"items": {}})
