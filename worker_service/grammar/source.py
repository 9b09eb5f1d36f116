"""What a reply must look like, as a grammar in llguidance's notation (Lark with JSON schemas inside). No I/O.

White space within JSON is a blank, or a line's end with indentation: a model that may write any amount of it may do nothing
else. Within calls it is one character at most, as models are trained to write them.
"""

import json
from dataclasses import dataclass

from penstock.services.domain.errors import invalid, unsupported
from penstock.services.tool_calls.formats import ToolFormat
from penstock.types.prompts import ChatPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.structured import StructuredOutput, StructureKind
from penstock.types.tools import NO_TOOLS, ToolMode, ToolUse

MAX_INDENTATION = 32
"""Characters: sixteen levels by two."""
_SPACE = f"[ \\t]|\\r?\\n[ \\t]{{0,{MAX_INDENTATION}}}"
_SPACE_IN_CALLS = "[ \\n]"
_JSON_OPTIONS = {"lenient": False, "coerce_one_of": False}
MAX_ERROR_CHARS = 200
_GRAMMAR_FIELD = "sampling.structured_output.grammar"
_ESCAPES = {"/": "/", "\n": "n", "\r": "r"}
_HEAD = '%llguidance {"no_forcing": true}\n'  # any tokens that spell a forced text will do: the model takes its own


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar to be compiled. field: what the request calls it; errors name it."""

    text: str
    field: str


def grammar_characters(request: GenerationRequest, form: ToolFormat | None) -> int:
    """About how long the grammar of a request's reply is; 0 where the model writes freely.

    form: how the model writes tool calls; None where it takes no tools.

    Raises:
        UnsupportedByModel: tools are offered to a model that takes none.
    """
    structured, tool_use = request.sampling.structured_output, _tool_use(request)
    if tool_use.offered and form is None:
        raise unsupported("prompt.chat.tool_use.tools", "this model's chat template takes no tools")
    enforced = _enforces_calls(tool_use, structured)
    size = sum(len(tool.parameters) for tool in tool_use.callable) if enforced else 0
    if structured is not None:
        size += len(structured.text) + sum(map(len, structured.choice))
    return size + 1 if enforced or structured is not None else 0


def reply_grammar(request: GenerationRequest, form: ToolFormat | None) -> GrammarSource:
    """The grammar of a request's reply, where it has `grammar_characters`.

    Raises:
        InvalidRequest: it is no GBNF, though it looks like it.
    """
    structured, tool_use = request.sampling.structured_output, _tool_use(request)
    if form is not None and _enforces_calls(tool_use, structured):
        return _calls(tool_use, form, structured)
    assert structured is not None
    return _structure(structured)


def _tool_use(request: GenerationRequest) -> ToolUse:
    return request.prompt.tool_use if isinstance(request.prompt, ChatPrompt) else NO_TOOLS


def _enforces_calls(tool_use: ToolUse, structured: StructuredOutput | None) -> bool:
    """Whether a grammar has calls in it: they are required, must fit their schema, or the rest of the reply has a form."""
    required = tool_use.choice.mode is ToolMode.REQUIRED
    strict = any(tool.strict for tool in tool_use.offered)
    return bool(tool_use.offered) and (required or strict or structured is not None)


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
            return " | ".join(map(json.dumps, structured.choice))
        case StructureKind.GRAMMAR:
            raise AssertionError("a grammar is no rule")


def _between_slashes(regex: str) -> str:
    """A regular expression as it may be written between slashes, on one line."""
    escaped, after_backslash = list[str](), False
    for char in regex:
        escape = char in _ESCAPES and not after_backslash
        escaped.append("\\" + _ESCAPES[char] if escape else _ESCAPES.get(char, char))
        after_backslash = char == "\\" and not after_backslash
    return "".join(escaped)


def _json(schema: str, space: str = _SPACE) -> str:
    """JSON that fits a schema, as a rule; the schema's own options for the compiler do not count."""
    return "%json " + json.dumps(json.loads(schema) | {"x-guidance": _JSON_OPTIONS | {"whitespace_pattern": space}})


def _lark(text: str) -> str:
    """A grammar of either notation in Lark's."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter has no error of its own
        raise invalid(_GRAMMAR_FIELD, f"is no GBNF: {str(error)[:MAX_ERROR_CHARS]}") from None


def _calls(tool_use: ToolUse, form: ToolFormat, structured: StructuredOutput | None) -> GrammarSource:
    """The grammar of a reply of calls, of calls within text, or of calls or a form."""
    rules = [
        _HEAD.rstrip(),
        f"SPACE: /{_SPACE_IN_CALLS}/",
        "body: " + " | ".join(f"body_{i}" for i in range(len(tool_use.callable))),
    ]
    for i, tool in enumerate(tool_use.callable):
        name, key = (json.dumps(json.dumps(text)) for text in (tool.name, form.arguments_key))
        rules.append(
            f'body_{i}: "{{" SPACE? "\\"name\\"" SPACE? ":" SPACE? {name} SPACE? "," SPACE? {key} SPACE? ":" SPACE? '
            f'arguments_{i} SPACE? "}}"'
        )
        rules.append(f"arguments_{i}: {_json(tool.parameters, _SPACE_IN_CALLS)}")
    begin = f"{json.dumps(form.begin)} SPACE? " if form.begin else ""
    end = f" SPACE? {json.dumps(form.end)}" if form.end else ""
    separator = f" SPACE? {json.dumps(form.separator)} SPACE? " if form.separator.strip() else " SPACE? "
    rules.append(f"call: {begin}body{end}")
    rules.append(f"calls: call ({separator}call)*" if tool_use.choice.parallel else "calls: call")
    field = "prompt.chat.tool_use.tools"
    if tool_use.choice.mode is ToolMode.REQUIRED:
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
    return GrammarSource(json.dumps({"grammars": grammars}), _GRAMMAR_FIELD)


def _calls_within_text(form: ToolFormat, *, parallel: bool) -> list[str]:
    """Rules for a reply that is free until a call begins."""
    if not form.begin:  # a reply that begins with an object is a call
        return ["start: calls | TEXT | ", "TEXT: /[^{](.|\\n)*/"]
    end = json.dumps(form.end)
    return [
        f"start: within{'*' if parallel else '?'} TEXT",
        "TEXT: /(.|\\n)*/",
        f"within: begun SPACE? body SPACE? {end}",
        f"begun[lazy]: TEXT {json.dumps(form.begin)}",
    ]
