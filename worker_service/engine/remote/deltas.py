"""The stream of a remote endpoint as the text that a model would have written. No I/O."""

import json
import math
from dataclasses import dataclass
from typing import Any

from penstock.services.reasoning import REASONING_FORMATS, ReasoningFormat
from penstock.services.tool_calls.formats import HERMES, ToolFormat
from penstock.types.replies import PositionLogprobs, TokenLogprob, Usage

TOOL_FORMAT: ToolFormat = HERMES
REASONING_FORMAT: ReasoningFormat = REASONING_FORMATS["think"]
"""The formats in which calls and reasoning, which endpoints send apart, are written into the text. The router reads them as
those of any model."""


@dataclass(slots=True)
class RemoteReply:
    """Reads the events of one reply.

    top: more likely tokens that are kept of each position. finish_reason: of the endpoint; None until it has come. usage: as
    the endpoint counts; None if it does not.
    """

    top: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None
    _reasoning: bool = False
    _calls: int = 0
    _call: Any = None  # the id or number of the call that is written
    _begun: bool = False

    def text(self, event: dict[str, Any]) -> str:
        """The text of an event.

        Raises:
            KeyError, TypeError, AttributeError: It is no event of a chat completion.
        """
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or 0
            self.usage = Usage(int(usage["prompt_tokens"]), int(cached), int(usage["completion_tokens"]))
        text = ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text += self._delta(delta)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return text

    def logprobs(self, event: dict[str, Any]) -> tuple[PositionLogprobs, ...]:
        """The log-probabilities of an event's tokens, whose ids the endpoint does not tell: 0.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: It is no event of a chat completion.
        """
        positions = list[PositionLogprobs]()
        for choice in event.get("choices") or ():
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                top = tuple(map(_token, (entry.get("top_logprobs") or ())[: self.top]))
                positions.append(PositionLogprobs(_token(entry), top))
        return tuple(positions)

    def end(self) -> str:
        """The text that closes what is open."""
        return self._end_reasoning() + self._end_call()

    def _delta(self, delta: dict[str, Any]) -> str:
        text = ""
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            text += (REASONING_FORMAT.begin if not self._reasoning else "") + str(reasoning)
            self._reasoning = True
        if content := delta.get("content"):
            text += self._end_reasoning() + self._end_call() + str(content)
        for call in delta.get("tool_calls") or ():
            text += self._end_reasoning() + self._call_delta(call)
        return text

    def _call_delta(self, call: dict[str, Any]) -> str:
        text, function = "", call.get("function") or {}
        number = call.get("index", self._calls)
        if number != self._call:
            text += self._end_call()
            separator = TOOL_FORMAT.separator if self._calls else ""
            self._call, self._calls, self._begun = number, self._calls + 1, False
            name = json.dumps(str(function["name"]))
            text += f'{separator}{TOOL_FORMAT.begin}{{"name": {name}, "{TOOL_FORMAT.arguments_key}": '
        if arguments := function.get("arguments"):
            self._begun = True
            text += str(arguments)
        return text

    def _end_reasoning(self) -> str:
        if not self._reasoning:
            return ""
        self._reasoning = False
        return REASONING_FORMAT.end

    def _end_call(self) -> str:
        if self._call is None:
            return ""
        text = ("" if self._begun else "{}") + "}" + TOOL_FORMAT.end
        self._call = None
        return text


def _token(entry: dict[str, Any]) -> TokenLogprob:
    """An endpoint may round a logarithm to above 0."""
    logprob, content = float(entry["logprob"]), entry.get("bytes")
    if math.isnan(logprob):
        raise ValueError("logprob: not a number")
    return TokenLogprob(0, min(0.0, logprob), str(entry["token"]).encode() if content is None else bytes(content))
