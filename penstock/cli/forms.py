"""Options of `ask` that say what the reply must look like, and what it may call."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import fail
from penstock.types.structured import StructuredOutput
from penstock.types.tools import Tool

_FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
ToolsOption = Annotated[Path | None, typer.Option(help="JSON file: a list of tools, as in OpenAI's API.", **_FILE)]
ToolChoiceOption = Annotated[str | None, typer.Option(help="auto, none, required, or a tool's name. Needs --tools.")]
JsonObjectOption = Annotated[bool, typer.Option("--json-object", help="The reply is a JSON object.")]
JsonSchemaOption = Annotated[
    Path | None, typer.Option(help="JSON file: the reply is JSON that fits this schema.", **_FILE)
]
RegexOption = Annotated[str | None, typer.Option(help="The whole reply matches.")]
GrammarOption = Annotated[
    Path | None, typer.Option(help="File: the reply is of this grammar, in Lark's notation or GBNF.", **_FILE)
]
ChoiceOption = Annotated[list[str] | None, typer.Option(help="The reply is one of these; repeat it.")]


def structured_output(
    json_object: bool, json_schema: Path | None, regex: str | None, grammar: Path | None, choice: list[str] | None
) -> StructuredOutput | None:
    """The form that the options ask for. Ends the command where there is more than one."""
    given = {
        "--json-object": json_object or None,
        "--json-schema": json_schema,
        "--regex": regex,
        "--grammar": grammar,
        "--choice": choice or None,
    }
    given_names = [name for name, value in given.items() if value is not None]
    if not given_names:
        return None
    if len(given_names) > 1:
        fail(f"{given_names[1]}: cannot be combined with {given_names[0]}", 2)
    return StructuredOutput(
        json_object=json_object,
        json_schema=_json(json_schema, "--json-schema", dict) if json_schema is not None else None,
        regex=regex,
        grammar=grammar.read_text() if grammar is not None else None,
        choice=tuple(choice or ()),
    )


def tools(path: Path | None, choice: str | None) -> tuple[Tool, ...]:
    """The tools of a file. Ends the command where it holds something else, or there is a choice and no file."""
    if path is None:
        if choice not in (None, "auto", "none"):
            fail("--tool-choice: needs --tools", 2)
        return ()
    parsed = []
    for i, entry in enumerate(_json(path, "--tools", list)):
        function = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            fail(f"--tools: {path}: entry {i} has no function with a name", 2)
        parameters = function.get("parameters") or {"type": "object"}
        parsed.append(
            Tool(function["name"], function.get("description") or "", parameters, bool(function.get("strict")))
        )
    return tuple(parsed)


def _json(path: Path, flag: str, kind: type) -> Any:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        fail(f"{flag}: {path} is not JSON: {error}", 2)
    if not isinstance(value, kind):
        fail(f"{flag}: {path} must hold a JSON {'list' if kind is list else 'object'}", 2)
    return value
