"""Forms of replies: what is refused before anything is compiled."""

import json

import pytest

from services.domain.structured import (
    MAX_CHOICES,
    MAX_SCHEMA_CHARS,
    MAX_SCHEMA_DEPTH,
    StructuredOutput,
    StructureKind,
    json_depth,
)


@pytest.mark.parametrize(
    ("text", "depth"),
    [("1", 0), ("{}", 1), ('{"a": [{}]}', 3), ('"[[["', 0), (r'{"\"[": "\\"}', 1), ('{"a": "}", "b": [[]]}', 3)],
)
def test_depth_counts_what_stands_outside_strings(text: str, depth: int) -> None:
    assert json_depth(text) == depth


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (StructuredOutput(StructureKind.JSON_SCHEMA, "[]"), "f.json_schema"),
        (StructuredOutput(StructureKind.JSON_SCHEMA, "{"), "f.json_schema"),
        (StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps({"title": "x" * MAX_SCHEMA_CHARS})), "f.json_schema"),
        (StructuredOutput(StructureKind.JSON_SCHEMA, '{"items":' * 100_000 + "{}" + "}" * 100_000), "f.json_schema"),
        (StructuredOutput(StructureKind.JSON_SCHEMA, '{"a":' * 65 + "1" + "}" * 65), "f.json_schema"),
        (StructuredOutput(StructureKind.REGEX, ""), "f.regex"),
        (StructuredOutput(StructureKind.REGEX, "a" * 10_000), "f.regex"),
        (StructuredOutput(StructureKind.GRAMMAR, ""), "f.grammar"),
        (StructuredOutput(StructureKind.GRAMMAR, "r ::= r\n" * 300), "f.grammar"),
        (StructuredOutput(StructureKind.CHOICE), "f.choice"),
        (StructuredOutput(StructureKind.CHOICE, choices=("a",) * (MAX_CHOICES + 1)), "f.choice"),
        (StructuredOutput(StructureKind.CHOICE, choices=("a", "")), "f.choice"),
    ],
)  # fmt: skip
def test_what_is_too_large_or_no_form_is_refused_by_name(form: StructuredOutput, field: str) -> None:
    assert [problem.field for problem in form.problems("f")] == [field]


def test_usual_forms_pass() -> None:
    deep = '{"items":' * (MAX_SCHEMA_DEPTH - 1) + "{}" + "}" * (MAX_SCHEMA_DEPTH - 1)
    for form in (
        StructuredOutput(StructureKind.JSON_OBJECT),
        StructuredOutput(StructureKind.JSON_SCHEMA, deep),
        StructuredOutput(StructureKind.REGEX, "[a-z]+"),
        StructuredOutput(StructureKind.CHOICE, choices=("yes", "no")),
    ):
        assert not [*form.problems("f")]
