"""Forms of replies: what is refused before anything is compiled."""

import json

import pytest

from penstock.types.structured import MAX_CHOICES, MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH, StructuredOutput, json_depth


@pytest.mark.parametrize(
    ("text", "depth"),
    [("1", 0), ("{}", 1), ('{"a": [{}]}', 3), ('"[[["', 0), (r'{"\"[": "\\"}', 1), ('{"a": "}", "b": [[]]}', 3)],
)
def test_depth_counts_what_stands_outside_strings(text: str, depth: int) -> None:
    assert json_depth(text) == depth


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (StructuredOutput(json_schema="[]"), "f.json_schema"),
        (StructuredOutput(json_schema="{"), "f.json_schema"),
        (StructuredOutput(json_schema=json.dumps({"title": "x" * MAX_SCHEMA_CHARS})), "f.json_schema"),
        (StructuredOutput(json_schema='{"items":' * 100_000 + "{}" + "}" * 100_000), "f.json_schema"),
        (StructuredOutput(json_schema='{"a":' * 65 + "1" + "}" * 65), "f.json_schema"),
        (StructuredOutput(regex=""), "f.regex"),
        (StructuredOutput(regex="a" * 10_000), "f.regex"),
        (StructuredOutput(grammar=""), "f.grammar"),
        (StructuredOutput(grammar="r ::= r\n" * 300), "f.grammar"),
        (StructuredOutput(), "f"),
        (StructuredOutput(choice=("a",) * (MAX_CHOICES + 1)), "f.choice"),
        (StructuredOutput(choice=("a", "")), "f.choice"),
    ],
)  # fmt: skip
def test_what_is_too_large_or_no_form_is_refused_by_name(form: StructuredOutput, field: str) -> None:
    assert [problem.field for problem in form.problems("f")] == [field]


def test_usual_forms_pass() -> None:
    deep = '{"items":' * (MAX_SCHEMA_DEPTH - 1) + "{}" + "}" * (MAX_SCHEMA_DEPTH - 1)
    for form in (
        StructuredOutput(json_object=True),
        StructuredOutput(json_schema=deep),
        StructuredOutput(regex="[a-z]+"),
        StructuredOutput(choice=("yes", "no")),
    ):
        assert not [*form.problems("f")]
