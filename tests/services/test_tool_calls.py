"""Tool calls in replies: read the same however the text is cut, checked against what was offered."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.tool_calls.checks import reply_objection
from penstock.services.tool_calls.formats import HERMES, LLAMA3_JSON, ToolFormat, format_of_template
from penstock.services.tool_calls.parser import CallDelta, ContentDelta, ToolCallParser, parse_reply
from penstock.services.tool_calls.rendering import calls_text
from penstock.types.prompts import ChatMessage, ChatPrompt, TextPrompt
from penstock.types.structured import StructuredOutput
from penstock.types.tools import Tool, ToolCall, ToolChoice, ToolMode, ToolUse

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_ARGUMENTS = st.dictionaries(st.text(max_size=6), _JSON, max_size=4).map(json.dumps)
_CALLS = st.lists(st.tuples(st.sampled_from(("add", "look_up", "a.b-c")), _ARGUMENTS), min_size=1, max_size=3)


def _streamed(
    text: str, form: ToolFormat, cuts: list[int], prompt: ChatPrompt | None = None
) -> tuple[str, dict[int, tuple[str, str]], bool]:
    """(content, calls by index, malformed) of a reply that comes in pieces."""
    parser, deltas, at = ToolCallParser(form, prompt), list[ContentDelta | CallDelta](), 0
    for size in [*cuts, len(text)]:
        deltas += parser.push(text[at : at + size])
        at += size
    deltas += parser.finish()
    calls = dict[int, tuple[str, str]]()
    for delta in deltas:
        if isinstance(delta, CallDelta):
            name, arguments = calls.get(delta.index, ("", ""))
            assert not (name and delta.name), "a call is named once"
            calls[delta.index] = name + delta.name, arguments + delta.arguments
    return "".join(d.text for d in deltas if isinstance(d, ContentDelta)), calls, parser.malformed


@given(_CALLS, st.sampled_from((HERMES, LLAMA3_JSON)), st.lists(st.integers(1, 9), max_size=60))
def test_calls_are_read_back_as_they_were_written_however_the_text_is_cut(
    calls: list[tuple[str, str]], form: ToolFormat, cuts: list[int]
) -> None:
    text = calls_text([ToolCall("", name, arguments) for name, arguments in calls], form)
    content, found, malformed = _streamed(text, form, cuts)
    assert not malformed
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found.values()] == [
        (name, json.loads(arguments)) for name, arguments in calls
    ]
    whole = parse_reply(text, form, "r")
    assert [(c.name, c.arguments) for c in whole.calls] == [*found.values()]


@given(st.text(alphabet='<tool_cal>/{}"name: 1,x\\ \n', max_size=60), st.lists(st.integers(1, 5), max_size=60))
def test_any_text_gives_the_same_reading_however_it_is_cut(text: str, cuts: list[int]) -> None:
    for prompt in (None, ChatPrompt((), ToolUse((Tool("a", "", "{}"),)))):
        assert _streamed(text, HERMES, cuts, prompt) == _streamed(text, HERMES, [], prompt)
    assert _streamed(text, LLAMA3_JSON, cuts) == _streamed(text, LLAMA3_JSON, [])


@given(st.text(max_size=50).filter(lambda text: "<" not in text))
def test_text_without_a_call_is_content_as_it_stands(text: str) -> None:
    assert _streamed(text, HERMES, [1] * len(text)) == (text, {}, False)


def test_text_around_calls_is_content_and_white_space_around_them_is_not() -> None:
    reply = parse_reply('Let me see.\n<tool_call>\n{"arguments": {"a": "}"}, "name": "f"}\n</tool_call>\n', HERMES, "r")
    assert reply.content == "Let me see."
    assert [(call.name, call.arguments) for call in reply.calls] == [("f", '{"a": "}"}')]
    assert reply.calls[0].id == parse_reply('<tool_call>{"name": "g"}</tool_call>', HERMES, "r").calls[0].id


_BARE = '{"name": "f", "arguments": {"n": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f" {_BARE}", "", 1),
        (f"{_BARE}\n{_BARE}\n", "", 2),
        ('{"parameters": {"n": 1}, "name": "f"}', "", 1),
        (f"{_BARE} is the call", "is the call", 1),
        (f"```json\n{_BARE}\n```", "", 1),
        (f"```\n{_BARE}\n{_BARE}\n```\nDone", "Done", 2),
        *((text, text, 0) for text in ("```json\n{}\n```", "```python\nf(1)\n```", "``` {", "``", f"`{_BARE}`")),
        (f"{_BARE}\n<tool_call>{_BARE}</tool_call>", "", 2),
        *((text, text, 0) for text in ('{"name": "g", "arguments": {}}', '{"name": "f", "arguments": 1}', "  {no")),
        *((text, text, 0) for text in (f"Call {_BARE}", '{"name": "f", "arguments": {"n"', '{"name": "f", "age": 3}')),
        ('{"n": 1}<tool_call>{"name": "f"}</tool_call>', '{"n": 1}', 1),
    ],
)
@settings(max_examples=20)
@given(st.lists(st.integers(1, 5), max_size=40))
def test_an_object_without_marks_is_a_call_of_an_offered_tool_or_text(
    text: str, content: str, calls: int, cuts: list[int]
) -> None:
    """However it is cut, nothing is handed out as text that becomes a call."""
    found = _streamed(text, HERMES, cuts, _said("Call f with 1."))
    assert (found[0], len(found[1]), found[2]) == (content, calls, False)
    assert _streamed(text, HERMES, cuts)[1].keys() == {*range(text.count("<tool_call>"))}, "none without offered names"


def _said(text: str, mode: ToolMode = ToolMode.AUTO) -> ChatPrompt:
    return ChatPrompt((ChatMessage("user", text),), ToolUse((Tool("f", "", "{}"),), ToolChoice(mode)))


@pytest.mark.parametrize(
    ("said", "arguments", "is_call"),
    [
        ("Weather in Sao Paulo?", {"city": "S\u00e3o Paulo"}, True),
        ("\u5317\u4eac\u5929\u6c14", {"city": "\u5317\u4eac"}, True),
        ("What is 250 dollars in euros?", {"amount": 250, "from": "USD"}, True),
        ("What time is it?", {}, True),
        ("What time is it?", {"utc": True}, True),
        ("Order it for A-9.", {"items": [{"customer": "A-9"}]}, True),
        ("What is HTTP short for?", {"city": "London"}, False),
        ("Who is it?", {"city": "it is London"}, False),
        ("What is HTTP short for?", {"amount": 100, "from": "USD"}, False),
    ],
)
def test_an_object_without_marks_is_no_call_where_all_its_values_are_invented(
    said: str, arguments: dict[str, object], is_call: bool
) -> None:
    text = json.dumps({"name": "f", "arguments": arguments})
    reply = parse_reply(text, HERMES, "r", _said(said))
    assert (len(reply.calls), reply.content) == ((1, "") if is_call else (0, text))
    assert (reply_objection(text, _said(said), "hermes", None) is None) == is_call
    assert parse_reply(text, HERMES, "r", _said(said, ToolMode.REQUIRED)).calls, "a call is required"
    assert parse_reply(f"<tool_call>{text}</tool_call>", HERMES, "r", _said(said)).calls, "marks say that it is one"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a"',
        '<tool_call>{"name": "f"} and more',
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 5_000 + "1" + "}" * 5_001 + "</tool_call>",
    ],
)
def test_a_call_that_is_none_is_content_and_malformed(text: str) -> None:
    reply = parse_reply(text, HERMES, "r")
    assert reply.malformed
    assert reply.calls == ()
    assert reply.content == text


def test_formats_are_known_by_the_chat_template() -> None:
    assert format_of_template("{% if tools %}<tools></tools> <tool_call>{% endif %}") is HERMES
    assert format_of_template('{% if tools %}{"name": function name, "parameters": ...}{% endif %}') is LLAMA3_JSON
    assert format_of_template("{% if tools %}<tool_call><function=f>{% endif %}") is None
    assert format_of_template("{{ messages }}") is None


TOOL = Tool(
    "f", "", json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}), strict=False
)


@pytest.mark.parametrize(
    ("text", "choice", "valid"),
    [
        ('<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>', ToolChoice(), True),
        ("no call is needed", ToolChoice(), True),
        ("no call", ToolChoice(ToolMode.REQUIRED), False),
        ('<tool_call>{"name": "g", "arguments": {"n": 1}}</tool_call>', ToolChoice(), False),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', ToolChoice(), False),
        ('<tool_call>{"name": "f", "arguments": {"n": "1"}}</tool_call>', ToolChoice(), False),
        ('<tool_call>{"name": "f", "arguments": {"n": tru', ToolChoice(), False),
        ("anything <tool_call> at all", ToolChoice(ToolMode.NONE), True),
    ],
)
def test_an_answer_that_is_no_valid_call_is_objected_to(text: str, choice: ToolChoice, valid: bool) -> None:
    objection = reply_objection(text, ChatPrompt((), ToolUse((TOOL,), choice)), "hermes", None)
    assert objection == (None if valid else "invalid_tool_call")


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (StructuredOutput(json_object=True), '{"a": 1}', "[1]"),
        (StructuredOutput(json_object=True), "{}", '{"cut off": '),
        (StructuredOutput(json_schema='{"enum": ["a", 2]}'), "2", '"b"'),
        (StructuredOutput(json_schema='{"type": "array", "items": {"type": "null"}}'), "[null]", "[1]"),
        (StructuredOutput(json_schema='{"type": "integer"}'), "1", "true"),
        (StructuredOutput(choice=("yes", "no")), "no", "maybe"),
        (StructuredOutput(json_object=True), "{}", '{"a":' * 50_000 + "1" + "}" * 50_000),
    ],
)
def test_an_answer_of_another_form_is_objected_to(form: StructuredOutput, good: str, bad: str) -> None:
    assert reply_objection(good, TextPrompt(""), "", form) is None
    assert reply_objection(bad, TextPrompt(""), "", form) == "invalid_structure"
