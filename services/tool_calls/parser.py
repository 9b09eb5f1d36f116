"""Reads tool calls from a reply while it comes. No I/O."""

import enum
import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.services.reasoning import overlap
from penstock.services.tool_calls.formats import ToolFormat
from penstock.types.prompts import ChatPrompt
from penstock.types.tools import ToolCall, ToolMode, arguments_object

_ARGUMENTS_KEYS = ("arguments", "parameters")  # models mix them up; there is no doubt what is meant
_SPACE = " \t\r\n"
_UNMARKED = re.compile(r"\s*(?:```\w*[ \t]*\n\s*)?(?=\{)")
"""Before an object that may be a call without marks."""
_MAY_BE_UNMARKED = re.compile(r"\s*(?:`{0,2}|```\w*[ \t]*(?:\n\s*)?)")
"""What may become that."""
_BLOCK_END = re.compile(r"\s*```")
_WORD = re.compile(r"\w+")
_LEAST_LETTERS = 3
"""Of a word that says where a value comes from; shorter ones occur in every text. Digits and other scripts say it at once."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text next to the calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Part of call number `index`. name: in a call's first part, else empty. arguments: more of their JSON text."""

    index: int
    name: str = ""
    arguments: str = ""


Delta = ContentDelta | CallDelta


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A whole reply. calls: in order. malformed: it begins a call that is none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: bool = False


def call_id(request_id: str, index: int) -> str:
    """The id of a reply's call: the same wherever the reply is read."""
    return "call_" + hashlib.blake2b(f"{request_id}/{index}".encode(), digest_size=12).hexdigest()


def parse_reply(text: str, form: ToolFormat, request_id: str, prompt: ChatPrompt | None = None) -> ParsedReply:
    """The calls in a whole reply. A call that is none is content, as it is. prompt: as in ToolCallParser."""
    parser = ToolCallParser(form, prompt)
    deltas = [*parser.push(text), *parser.finish()]
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    names, arguments = dict[int, str](), dict[int, str]()
    for delta in deltas:
        if isinstance(delta, CallDelta):
            names[delta.index] = names.get(delta.index) or delta.name
            arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    if parser.malformed:
        return ParsedReply(text, (), malformed=True)
    calls = tuple(ToolCall(call_id(request_id, i), name, arguments[i] or "{}") for i, name in names.items())
    return ParsedReply(content, calls)


class _State(enum.Enum):
    START = "before a call without a mark"
    TEXT = "outside calls"
    CALL = "within one"
    BARE = "within one that may be a call without its marks"
    END = "after a call's object, before its end mark"
    PLAIN = "no call can come any more"


class ToolCallParser:
    """Feeds on a reply's text and hands out its content and its calls, each as soon as it is certain.

    What is handed out depends on the text alone, not on how it is cut. White space around calls is no content.

    Models that should mark their calls leave the marks out at times, or write a block of code: an object at the beginning of
    a reply is a call if it has nothing but the name of a tool that `prompt` offers and arguments of which a word occurs in
    its messages. (Where no call is required, small models call a tool with values that they invent rather than answer.) It is
    held until that is certain.
    """

    def __init__(self, form: ToolFormat, prompt: ChatPrompt | None = None) -> None:
        self._form = form
        self._prompt = prompt if prompt is not None else ChatPrompt(())
        self._offered = {tool.name for tool in self._prompt.tool_use.callable}
        self._state = _State.START
        self._scanner = _CallScanner()  # of the call that is being read
        self._rest = ""  # not yet certain
        self._space = ""  # content if more content follows
        self._raw = ""  # of the call that is being read, until its name is known
        self._in_block = False  # of code, in which there was a call
        self._after_call = False  # no content has followed the last one
        self.calls = 0
        self.malformed = False

    def push(self, text: str) -> list[Delta]:
        """What is certain with this text."""
        self._rest += text
        deltas = list[Delta]()
        while True:
            before = self._state, len(self._rest)
            deltas += self._step()
            if (self._state, len(self._rest)) == before:
                return deltas

    def finish(self) -> list[Delta]:
        """What is left once the reply has ended. A call that has not ended is malformed."""
        deltas = list[Delta]()
        if self._state is _State.CALL:
            self.malformed |= self._scanner.named or bool(self._form.begin)
        if self._state is _State.BARE or (self._state is _State.CALL and not self._scanner.named):
            deltas += self._content(self._raw)
        deltas += self._content(self._rest)
        if self._space and not self.calls:
            deltas.append(ContentDelta(self._space))
        self._state, self._rest, self._raw, self._space = _State.PLAIN, "", "", ""
        return deltas

    def _step(self) -> list[Delta]:
        match self._state:
            case _State.START:
                self._begin_bare()
            case _State.TEXT:
                return [*self._read_text()]
            case _State.CALL:
                return [*self._read_call()]
            case _State.BARE:
                return [*self._read_bare()]
            case _State.END:
                self._read_end()
            case _State.PLAIN:
                rest, self._rest = self._rest, ""
                return [*self._content(rest)]
        return []

    def _begin_bare(self) -> None:
        """Where an object is a call: does one begin here?"""
        if self._form.begin:
            self._begin_unmarked()
            return
        text = self._rest.lstrip(_SPACE + (self._form.separator if self.calls else ""))
        if not text:
            return
        if text[0] == "{":
            self._rest, self._raw, self._state, self._scanner = text, "", _State.CALL, _CallScanner()
        else:
            self.malformed |= self.calls > 0
            self._state = _State.PLAIN

    def _begin_unmarked(self) -> None:
        """Where calls have marks: does an object begin here, possibly in a block of code?"""
        if self._in_block and (end := _BLOCK_END.match(self._rest)):
            self._in_block, self._rest = False, self._rest[end.end() :]
        begin = _UNMARKED.match(self._rest) if self._offered else None
        if begin is not None:
            self._raw, self._rest = self._rest[: begin.end()], self._rest[begin.end() :]
            self._in_block, self._state = self._in_block or "`" in self._raw, _State.BARE
            self._scanner = _CallScanner()
        elif not _MAY_BE_UNMARKED.fullmatch(self._rest):
            self._state = _State.TEXT

    def _read_bare(self) -> Iterator[Delta]:
        """An object without the marks of the format."""
        scanner, text = self._scanner, self._rest
        used = scanner.push(text)
        self._rest, self._raw = text[used:], self._raw + text[:used]
        known = scanner.name in self._offered
        if scanner.done and scanner.sound and known and not scanner.has_other_keys:
            arguments = scanner.take_arguments()
            may_decline = self._prompt.tool_use.choice.mode is ToolMode.AUTO
            if may_decline and not self._are_of_messages(arguments_object(arguments)):
                self.malformed = True
                yield from self._content(self._raw)
                self._raw, self._state = "", _State.PLAIN
                return
            yield CallDelta(self.calls, scanner.name, arguments)
            self.calls, self._raw, self._state, self._after_call = self.calls + 1, "", _State.START, True
        elif scanner.done or scanner.failed or scanner.has_other_keys or (scanner.named and not known):
            raw, self._raw, self._state = self._raw, "", _State.TEXT
            yield from self._content(raw)

    def _read_text(self) -> Iterator[Delta]:
        begin = self._form.begin
        at = self._rest.find(begin)
        if at >= 0:
            yield from self._content(self._rest[:at])
            self._rest, self._space, self._raw = self._rest[at + len(begin) :], "", begin
            self._state, self._scanner = _State.CALL, _CallScanner()
            return
        held = overlap(self._rest, begin)
        certain, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
        yield from self._content(certain)

    def _read_call(self) -> Iterator[Delta]:
        scanner, text = self._scanner, self._rest
        if not text:
            return
        was_named = scanner.named
        used = scanner.push(text)
        self._rest = text[used:]
        if scanner.named:
            if not was_named:
                yield CallDelta(self.calls, scanner.name)
            if arguments := scanner.take_arguments():
                yield CallDelta(self.calls, arguments=arguments)
        else:
            self._raw += text[:used]
        if scanner.failed or (scanner.done and not scanner.sound):
            # Without a mark an object that has no name is an answer in JSON, and no call.
            self.malformed |= scanner.named or bool(self._form.begin)
            if not scanner.named:
                yield from self._content(self._raw)
            self._raw, self._state = "", _State.PLAIN
        elif scanner.done:
            self.calls += 1
            self._raw, self._state = "", _State.END if self._form.end else _State.START

    def _read_end(self) -> None:
        text, end = self._rest.lstrip(_SPACE), self._form.end
        if text.startswith(end):
            self._rest, self._state, self._after_call = text[len(end) :], _State.TEXT, True
        elif not end.startswith(text):
            self.malformed, self._state = True, _State.PLAIN
        elif text == "":
            self._rest = ""

    def _content(self, text: str) -> Iterator[Delta]:
        """Content, but for white space at its end, which waits for what follows."""
        whole = self._space + text
        bare = whole.rstrip(_SPACE)
        if self._after_call:
            bare, whole = bare.lstrip(_SPACE), whole.lstrip(_SPACE)
            self._after_call = not bare
        self._space = whole[len(bare) :]
        if bare:
            yield ContentDelta(bare)

    def _are_of_messages(self, arguments: object) -> bool:
        """Whether a word of the arguments' values occurs in the prompt's messages, or they have none."""
        parts = [
            part
            for value in _values(arguments)
            for part in _WORD.findall(_folded(value))
            if len(part) >= _LEAST_LETTERS or not part.isascii() or not part.isalpha()
        ]
        return not parts or any(part in self._messages for part in parts)

    @functools.cached_property
    def _messages(self) -> str:
        """What the prompt's messages say, once a call without marks is held against them."""
        every = self._prompt.messages
        return _folded(
            "\n".join(text for m in every for text in (m.content, *(call.arguments for call in m.tool_calls)))
        )


def _values(value: object) -> Iterator[str]:
    """The text of all values within a JSON value, but for `true`, `false` and `null`."""
    match value:
        case dict():
            for each in value.values():
                yield from _values(each)
        case list():
            for each in value:
                yield from _values(each)
        case None | bool():
            return
        case _:
            yield str(value)


def _folded(text: str) -> str:
    """Without case and accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c)).casefold()


@dataclass(slots=True)
class _CallScanner:
    """Follows one JSON object, character by character: its `name`, and the text of its arguments."""

    name: str = ""
    named: bool = False
    done: bool = False
    failed: bool = False
    has_other_keys: bool = False
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _key: str | None = None  # None: the next string is a key
    _value: list[str] = field(default_factory=list)
    _arguments: list[str] = field(default_factory=list)  # not yet taken
    _whole: list[str] = field(default_factory=list)  # all of them

    @property
    def sound(self) -> bool:
        """Whether a finished object is a call."""
        return self.named and arguments_object("".join(self._whole)) is not None

    def push(self, text: str) -> int:
        """Follow the text; return how much of it belongs to the object."""
        for at, char in enumerate(text):
            self._take(char)
            if self.failed or self.done:
                return at + 1
        return len(text)

    def take_arguments(self) -> str:
        """The arguments' text that has come since the last time."""
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def _take(self, char: str) -> None:
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1 and self._key is None:
                    self._key = self._decoded()
                    self.has_other_keys |= self._key not in ("name", *_ARGUMENTS_KEYS)
        elif self._depth == 0:
            if char == "{":
                self._depth = 1
            elif char not in _SPACE:
                self.failed = True
        elif char == '"':
            self._in_string = True
            self._keep(char)
        elif self._depth > 1:
            self._keep(char)
            self._depth += (char in "{[") - (char in "}]")
        elif char in "{[":
            self._depth = 2
            self._keep(char)
        elif char in ",}":
            self._end_value()
            self.done = char == "}"
        elif char not in _SPACE and char != ":":
            self._keep(char)

    def _keep(self, char: str) -> None:
        if self._key in _ARGUMENTS_KEYS:
            self._whole.append(char)
            self._arguments.append(char)
        else:
            self._value.append(char)

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = self._decoded() or ""
            self.named = bool(self.name)
            self.failed |= not self.named
        self._key, self._value = None, []

    def _decoded(self) -> str | None:
        """The string that has been kept; empty where it is none."""
        text, self._value = "".join(self._value), []
        try:
            value = json.loads(text)
        except ValueError:
            return ""
        return value if isinstance(value, str) else ""
