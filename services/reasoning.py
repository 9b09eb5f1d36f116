"""How models mark their reasoning, and its separation from the answer. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.types.prompts import ChatPrompt, Prompt
from penstock.types.sampling import SamplingParams
from penstock.types.tools import ToolMode

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around a model's reasoning, which comes before its answer.

    opened, opened_on_request: the chat template writes the first mark itself: where the request says nothing about
        reasoning, and where it asks for it.
    """

    name: str
    opened: bool = False
    opened_on_request: bool = False
    begin: str = "<think>"
    end: str = "</think>"

    def is_opened(self, thinking: bool | None) -> bool:
        """Whether a reply begins within the reasoning. thinking: what the request says about it."""
        return self.opened if thinking is None else thinking and self.opened_on_request


_ALL = (
    ReasoningFormat("think"),
    ReasoningFormat("think_opened", opened=True, opened_on_request=True),
    ReasoningFormat("think_opened_on_request", opened_on_request=True),
)
REASONING_FORMATS = {one.name: one for one in _ALL}
"""Those of DeepSeek R1 and V3.1, Qwen 3, QwQ, GLM 4.5 and their relatives."""


def format_of_template(template: str, render: Callable[[bool | None], str]) -> ReasoningFormat | None:
    """The format that a chat template implies; None if it has no marks.

    render: the beginning of a reply as the template writes it, without a wish and with thinking switched on or off.
    """
    if _ALL[0].end not in template:
        return None
    opened = tuple(render(thinking).rstrip(_SPACE).endswith(_ALL[0].begin) for thinking in (None, True))
    return next((one for one in _ALL if (one.opened, one.opened_on_request) == opened), _ALL[0])


def reasoning_parser(name: str, prompt: Prompt, sampling: SamplingParams) -> "ReasoningParser | None":
    """The parser of a reply to a request; None if its model does not reason.

    name: of the model's format. A reply with an enforced form has no reasoning: the form holds from its first token.
    """
    form = REASONING_FORMATS.get(name)
    if form is None or not isinstance(prompt, ChatPrompt):
        return None
    if sampling.structured_output is not None or (
        prompt.tool_use.offered and prompt.tool_use.choice.mode is ToolMode.REQUIRED
    ):
        return None
    return ReasoningParser(form, opened=form.is_opened(prompt.wants_reasoning))


class ReasoningParser:
    """Separates a reply's reasoning from its answer while it comes.

    The result depends on the text alone, not on how it is cut. White space around the marks belongs to neither part.
    """

    def __init__(self, form: ReasoningFormat, *, opened: bool) -> None:
        self._form, self._opened = form, opened
        self._rest = ""  # not yet certain
        self._state = _REASONING if opened else _START
        self._bare = True  # nothing of the current part has come yet

    def copy(self) -> "ReasoningParser":
        """A parser of the same reply that has read nothing yet."""
        return ReasoningParser(self._form, opened=self._opened)

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that are certain with this text."""
        if self._state == _ANSWER and not self._bare:
            return "", text
        self._rest += text
        if self._state == _START and not self._decide():
            return "", ""
        reasoning = self._read_reasoning() if self._state == _REASONING else ""
        return reasoning, self._read_answer() if self._state == _ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """What is left at the end of the reply. Reasoning that has not ended is no answer."""
        rest, self._rest = self._rest, ""
        if self._state == _REASONING:
            return rest.rstrip(_SPACE), ""
        return "", rest if self._state == _START else ""

    def _decide(self) -> bool:
        """Whether it is known how the reply begins."""
        text, begin = self._rest.lstrip(_SPACE), self._form.begin
        if text.startswith(begin):
            self._rest, self._state = text[len(begin) :], _REASONING
        elif begin.startswith(text):
            return False
        else:
            self._state, self._bare = _ANSWER, False  # white space at its beginning is the answer's
        return True

    def _read_reasoning(self) -> str:
        if self._bare:
            self._rest = self._rest.lstrip(_SPACE)
        at = self._rest.find(self._form.end)
        if at >= 0:
            part, self._rest = self._rest[:at].rstrip(_SPACE), self._rest[at + len(self._form.end) :]
            self._state, self._bare = _ANSWER, True
            return part
        certain = len(self._rest) - overlap(self._rest, self._form.end)
        certain = len(self._rest[:certain].rstrip(_SPACE))
        part, self._rest = self._rest[:certain], self._rest[certain:]
        self._bare = self._bare and not part
        return part

    def _read_answer(self) -> str:
        text, self._rest = self._rest, ""
        if self._bare:
            text = text.lstrip(_SPACE)
            self._bare = not text
        return text


_START, _REASONING, _ANSWER = range(3)


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
