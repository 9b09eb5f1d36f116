"""What a reply must look like, as a grammar in llguidance's notation (Lark with JSON schemas inside). No I/O.

White space within JSON is free but bounded: an unbounded run of it would be a reply without an end.
"""

import json
from dataclasses import dataclass

from services.domain.errors import FieldProblem, UnsupportedByModel
from services.domain.requests import ChatPrompt, GenerationRequest
from services.domain.structured import StructuredOutput, StructureKind
from services.domain.tools import ToolMode, ToolUse
from services.tool_calls import ToolFormat

MAX_SPACE = 16
"""Characters of white space in a row between the parts of JSON: a line's end and the indentation of seven levels by two."""
_SPACE = f"[ \\n\\r\\t]{{1,{MAX_SPACE}}}"
_JSON_OPTIONS = {"whitespace_pattern": _SPACE, "lenient": False, "coerce_one_of": False}
_ESCAPES = {"/": "/", "\n": "n", "\r": "r"}
_HEAD = '%llguidance {"no_forcing": true}\n'  # any tokens that spell a forced text will do: the model takes its own


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar to be compiled. field: what the request calls it; errors name it."""

    text: str
    field: str


def reply_grammar(request: GenerationRequest, form: ToolFormat | None) -> GrammarSource | None:
    """The grammar of a request's reply; None where the model writes freely.

    form: how the model writes tool calls; None where it takes no tools.

    Raises:
        UnsupportedByModel: tools are offered to a model that takes none.
    """
    structured = request.sampling.structured_output
    tool_use = request.prompt.tool_use if isinstance(request.prompt, ChatPrompt) else ToolUse()
    if tool_use.offered and form is None:
        raise UnsupportedByModel(FieldProblem("prompt.chat.tools", "this model's chat template takes no tools"))
    if tool_use.offered and form is not None and (calls := _calls(tool_use, form, structured)) is not None:
        return calls
    return None if structured is None else _structure(structured)


def _structure(structured: StructuredOutput) -> GrammarSource:
    field = f"sampling.structured_output.{structured.kind.value}"
    if structured.kind is StructureKind.GRAMMAR:
        return GrammarSource(_lark(structured.text), field)
    return GrammarSource(f"{_HEAD}start: {_rule(structured)}\n", field)


def _rule(structured: StructuredOutput) -> str:
    """The right side of a rule for everything but a whole grammar."""
    match structured.kind:
        case StructureKind.JSON_OBJECT:
            return _json('{"type": "object"}')
        case StructureKind.JSON_SCHEMA:
            return _json(structured.text)
        case StructureKind.REGEX:
            return f"/{_between_slashes(structured.text)}/"
        case StructureKind.CHOICE:
            return " | ".join(map(json.dumps, structured.choices))
        case StructureKind.GRAMMAR:
            raise AssertionError("a grammar is no rule")


def _between_slashes(regex: str) -> str:
    """A regular expression as it may stand between slashes, on one line."""
    escaped, after_backslash = list[str](), False
    for char in regex:
        escape = char in _ESCAPES and not after_backslash
        escaped.append("\\" + _ESCAPES[char] if escape else _ESCAPES.get(char, char))
        after_backslash = char == "\\" and not after_backslash
    return "".join(escaped)


def _json(schema: str) -> str:
    """JSON that fits a schema, as a rule; the schema's own options for the compiler do not count."""
    return "%json " + json.dumps(json.loads(schema) | {"x-guidance": _JSON_OPTIONS})


def _lark(text: str) -> str:
    """A grammar of either notation in Lark's."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    return str(any_to_lark(text))


def _calls(tool_use: ToolUse, form: ToolFormat, structured: StructuredOutput | None) -> GrammarSource | None:
    """The grammar of a reply of calls, or of calls within text, or of calls or a form; None where nothing is to be enforced."""
    required = tool_use.choice.mode is ToolMode.REQUIRED
    if not required and structured is None and not any(tool.strict for tool in tool_use.tools):
        return None
    rules = [
        _HEAD.rstrip(),
        f"SPACE: /{_SPACE}/",
        "body: " + " | ".join(f"body_{i}" for i in range(len(tool_use.callable))),
    ]
    for i, tool in enumerate(tool_use.callable):
        name, key = (json.dumps(json.dumps(text)) for text in (tool.name, form.arguments_key))
        rules.append(
            f'body_{i}: "{{" SPACE? "\\"name\\"" SPACE? ":" SPACE? {name} SPACE? "," SPACE? {key} SPACE? ":" SPACE? '
            f'arguments_{i} SPACE? "}}"'
        )
        rules.append(f"arguments_{i}: {_json(tool.parameters)}")
    begin = f"{json.dumps(form.begin)} SPACE? " if form.begin else ""
    end = f" SPACE? {json.dumps(form.end)}" if form.end else ""
    separator = f" SPACE? {json.dumps(form.separator)} SPACE? " if form.separator.strip() else " SPACE? "
    rules.append(f"call: {begin}body{end}")
    rules.append(f"calls: call ({separator}call)*" if tool_use.choice.parallel else "calls: call")
    field = "prompt.chat.tools"
    if required:
        return GrammarSource("\n".join([*rules, "start: calls"]), field)
    if structured is None:
        return GrammarSource("\n".join([*rules, *_calls_within_text(form, parallel=tool_use.choice.parallel)]), field)
    if structured.kind is not StructureKind.GRAMMAR:
        field = f"sampling.structured_output.{structured.kind.value}"
        return GrammarSource("\n".join([*rules, "start: calls | reply", f"reply: {_rule(structured)}"]), field)
    grammars = [
        {"lark_grammar": "\n".join([*rules, "start: calls | @reply"])},
        {"name": "reply", "lark_grammar": _lark(structured.text)},
    ]
    return GrammarSource(json.dumps({"grammars": grammars}), "sampling.structured_output.grammar")


def _calls_within_text(form: ToolFormat, *, parallel: bool) -> list[str]:
    """Rules for a reply that is free until a call begins."""
    if not form.begin:  # a reply that begins with an object is a call
        return ["start: calls | TEXT | ", "TEXT: /[^{](.|\\n)*/"]
    end = json.dumps(form.end)
    return [
        f'start: within{"*" if parallel else "?"} TEXT',
        "TEXT: /(.|\\n)*/",
        f"within: begun SPACE? body SPACE? {end}",
        f"begun[lazy]: TEXT {json.dumps(form.begin)}",
    ]
