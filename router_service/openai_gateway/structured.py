"""Request fields for structured output: OpenAI's `response_format`, and the extensions of vLLM and SGLang. No I/O."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.router_service.openai_gateway.json_values import StrictModel
from penstock.types.problems import FieldProblem
from penstock.types.structured import MAX_CHOICES, StructuredOutput

_Choices = Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)]


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """strict: the schema is enforced either way."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None


class StructuredFields(StrictModel):
    """The fields of a request that set the form of the reply; at most one may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM
    guided_json: dict[str, Any] | str | None = None  # vLLM before 0.12
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # SGLang
    ebnf: str | None = None

    def forms(self) -> Iterator[tuple[str, StructuredOutput]]:
        """(field, form) of every form that is set."""
        if self.model_fields_set.isdisjoint(_FORM_FIELDS):
            return  # the usual request: nothing to look at
        form = self.response_format
        if isinstance(form, JsonObjectFormat):
            yield "response_format", StructuredOutput(json_object=True)
        elif isinstance(form, JsonSchemaFormat):
            yield (
                "response_format.json_schema.schema",
                StructuredOutput(json_schema=json_schema(form.json_schema.schema_)),
            )
        vllm = self.structured_outputs or StructuredOutputs()
        if vllm.json_object:
            yield "structured_outputs.json_object", StructuredOutput(json_object=True)
        for field, value, kind in (
            ("structured_outputs.json", vllm.json_, "json_schema"),
            ("guided_json", self.guided_json, "json_schema"),
            ("structured_outputs.regex", vllm.regex, "regex"),
            ("guided_regex", self.guided_regex, "regex"),
            ("regex", self.regex, "regex"),
            ("structured_outputs.grammar", vllm.grammar, "grammar"),
            ("guided_grammar", self.guided_grammar, "grammar"),
            ("ebnf", self.ebnf, "grammar"),
            ("structured_outputs.choice", vllm.choice, "choice"),
            ("guided_choice", self.guided_choice, "choice"),
        ):
            match value:
                case dict():
                    yield field, StructuredOutput(json_schema=json_schema(value))
                case list():
                    yield field, StructuredOutput(choice=tuple(value))
                case str():
                    named: dict[str, Any] = {kind: value}
                    yield field, StructuredOutput(**named)

    def structured_output(self) -> StructuredOutput | None:
        """The form that is set."""
        return next((form for _, form in self.forms()), None)

    def structured_field(self) -> str:
        """The field that sets it, as the client wrote it."""
        return next((field for field, _ in self.forms()), "response_format")

    def structured_problems(self) -> Iterator[FieldProblem]:
        fields = [field for field, _ in self.forms()]
        for field in fields[1:]:
            yield FieldProblem(field, f"cannot be combined with {fields[0]}")


_FORM_FIELDS = frozenset(StructuredFields.model_fields)


def json_schema(schema: dict[str, Any]) -> str:
    """A schema as text."""
    return json.dumps(schema, ensure_ascii=False)
