"""What the clients' calls take and return, in addition to the value types of `penstock.types`. Times are in seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.types.events import RequestEvent, TierSummary
from penstock.types.mesh_status import ServedModel
from penstock.types.replies import FinishReason, PositionLogprobs, Usage
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloResult
from penstock.types.tools import Tool, ToolCall
from penstock.types.values import value_type

Message = Mapping[str, Any]
"""A chat message: {"role": "user", "content": "..."}. An assistant's may have `tool_calls`, each a ToolCall or a mapping as
in OpenAI's API; one of role `tool` has the `tool_call_id` that it answers."""

Prompt = str | Sequence[Message] | Sequence[int]
"""Text (sent as one user message), the messages of a chat, or token ids to continue."""


@value_type(frozen=True, slots=True)
class Options(SamplingParams):
    """Options of a request: sampling parameters, and those below. None: the server's default.

    model: `cascade`, or the name of a tier.
    raw: continue the prompt text without a chat template.
    priority: from -100 to 100; waiting requests with a higher priority go first.
    tools: functions that the model may call.
    tool_choice: auto (the model decides), none, required, or the name of the tool to call; None: auto.
    parallel_tool_calls: whether one reply may have several calls.
    thinking: whether the model reasons before it answers. reasoning_effort: how much, in the words of its chat template. The
        reasoning is part of the text, between the model's marks.
    prediction: what the answer will be, in large part, such as a file that it is to change. Where it is right, the answer is
        generated faster; it never changes the answer.
    cache_salt: only requests with the same salt share the KV of prompts that begin alike; at most 128 characters. Without
        one, it is shared with all requests that have none.
    metadata: of this request's calls, in lower case, in addition to the client's and in place of it.
    trace: request a trace; `trace_id` then names it. A router limits the number of traces, so it may be empty.
    """

    model: str = "cascade"
    slo: Slo | None = None
    priority: int = 0
    raw: bool = False
    request_id: str | None = None
    tools: Sequence[Tool] = ()
    tool_choice: str | None = None
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    reasoning_effort: str = ""
    trace: bool = False
    prediction: str = ""
    cache_salt: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters alone."""
        return SamplingParams(*[getattr(self, each.name) for each in fields(SamplingParams)])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Part of the answer: `text` and its tokens, which begin at output position `offset`."""

    tier: str
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()


Event = RequestEvent | Tokens


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer. `tier`: the tier that gave it. `tiers`: all tiers that worked on the request.

    text: as the model wrote it, calls included. tool_calls: the calls in it. content: the text without them.
    slo: of a request with an SLO.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason
    tier: str
    usage: Usage
    tiers: tuple[TierSummary, ...]
    ttft_s: float | None
    total_s: float
    request_id: str
    trace_id: str
    tool_calls: tuple[ToolCall, ...] = ()
    content: str = ""
    slo: SloResult | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message of the chat that continues."""
        return {"role": "assistant", "content": self.content, "tool_calls": self.tool_calls}


@dataclass(frozen=True, slots=True)
class Move:
    """The result of a move. refusal: why the reply stayed at its instance; None if it moved.

    offset: output tokens generated before the move. stall_s: from the last step at the source to the first event of the
    target.
    """

    refusal: str | None
    offset: int = 0
    stall_s: float = 0.0
    sent_bytes: int = 0


Model = ServedModel
