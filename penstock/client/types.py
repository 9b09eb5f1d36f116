"""Requests, responses and events of the clients. Times are in seconds."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""A chat message: {"role": "user", "content": "..."}. An assistant's may have `tool_calls`, each a ToolCall or a mapping as
in OpenAI's API; one of role `tool` has the `tool_call_id` that it answers."""

Prompt = str | Sequence[Message] | Sequence[int]
"""Text (sent as one user message), the messages of a chat, or token ids to continue."""


class FinishReason(enum.Enum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    DECLINED = "declined"


@dataclass(frozen=True, slots=True)
class SloPhase:
    """From output token `from_output_token` on, the average time per token is at most `time_per_output_token_s`.

    after_marker: the phase begins after the first occurrence of this text instead, such as `</think>`.
    """

    from_output_token: int
    time_per_output_token_s: float
    after_marker: str = ""


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of a request.

    time_per_output_token_s: for the whole answer; `phases` are for answers with several paces.
    name: a class of the mesh file, such as `interactive`, instead of objectives.
    fallback: what follows if no worker can keep them: `best_effort`, or `decline` (the reply's finish_reason is DECLINED);
        None: what the class or the mesh file says.
    """

    time_to_first_token_s: float | None = None
    phases: tuple[SloPhase, ...] = ()
    time_per_output_token_s: float | None = None
    name: str = ""
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class SloResult:
    """How a request with an SLO was served.

    slo_class: `standard` if a worker ever promised to keep it, else `best_effort`; None if it was declined.
    attained: whether the first token and every window of ten tokens came in time, whatever the class.
    first_token_late_s: 0 if it was in time; None if there was none.
    windows, late_windows: windows of ten tokens with a promised pace, and those that took too long.
    """

    slo_class: str | None
    attained: bool
    first_token_late_s: float | None
    windows: int = 0
    late_windows: int = 0


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: JSON schema of its arguments. strict: calls must fit the schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model has made. arguments: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that a reply must have; exactly one field is set.

    json_object: any JSON object. json_schema: JSON that fits a schema, given as mapping or text.
    regex: the whole reply matches. grammar: in Lark's notation, or GBNF. choice: one of these texts.
    """

    json_object: bool = False
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a request. None: the server's default.

    model: `cascade`, or the name of a tier.
    temperature: from 0 (greedy) to 2. top_p: above 0, at most 1. top_k: draw from so many most likely tokens; 0: from all. Of
        these three, the server's default is the model's own.
    seed: the same seed and prompt give the same text.
    max_tokens: largest length of the reply. stop: the reply ends before the first of these strings.
    top_logprobs: None: no logprobs. 0 to 20: logprobs of the chosen tokens and of this many of the most likely ones.
    raw: continue the prompt text without a chat template.
    priority: from -100 to 100; waiting requests with a higher priority go first.
    tools: functions that the model may call.
    tool_choice: auto (the model decides), none, required, or the name of the tool to call; None: auto.
    parallel_tool_calls: whether one reply may have several calls.
    structured_output: the form that the reply must have.
    frequency_penalty, presence_penalty, repetition_penalty: against tokens that the reply has already; -2 to 2, and for the
        last one over 0, at most 2. logit_bias: added to the logits of tokens, by id; -100 to 100.
    min_p: draw only from tokens at least so likely as this share of the most likely one; 0 to 1.
    stop_token_ids: the reply ends before the first of these tokens. ignore_eos: continue after the end-of-sequence token.
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
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    slo: Slo | None = None
    priority: int = 0
    raw: bool = False
    request_id: str | None = None
    tools: Sequence[Tool] = ()
    tool_choice: str | None = None
    parallel_tool_calls: bool = True
    structured_output: StructuredOutput | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_p: float = 0.0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    thinking: bool | None = None
    reasoning_effort: str = ""
    trace: bool = False
    prediction: str = ""
    cache_salt: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a reply.

    accepted_draft_tokens: of the output tokens, those that a draft proposed: a rejected answer, or `Options.prediction`.
    rejected_draft_tokens: proposed tokens that were verified in vain.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its logprob."""

    token_id: int
    logprob: float
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token and the most likely ones at one output position."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The router has accepted the request. burst_step: that it takes of the plan's burst ladder; None without one, and for
    requests that name a tier or resume a stream."""

    request_id: str
    plan_revision: int
    seed: int
    burst_step: int | None = None


@dataclass(frozen=True, slots=True)
class TierStarted:
    """A tier has started on an answer."""

    tier: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class TierAdmitted:
    """An instance serves the request.

    slo_kept: it promises to keep the SLO. slo_class: `standard` or `best_effort`, None without an SLO; it holds until the
    next event of this kind.
    """

    tier: str
    instance_id: str
    slo_kept: bool
    slo_class: str | None = None


@dataclass(frozen=True, slots=True)
class TierDeclined:
    """An instance cannot keep the SLO. Another one is tried, or the next tier, or what the SLO's fallback says."""

    tier: str
    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Part of the answer: `text` and its tokens, which begin at output position `offset`."""

    tier: str
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Judged:
    """The judge's score of a tier's answer; `score` is None if it could not be scored.

    reason: why the judge gave 0 without its scorer, such as `truncated_answer`; otherwise empty.
    flagged: the answer was returned although its score is below the threshold: there is no further tier.
    accepted: it is the answer that is delivered. better_tier: the earlier tier whose answer is delivered instead, because it
    scored more, where the plan has best_answer; otherwise empty.
    """

    tier: str
    score: float | None
    threshold: float
    accepted: bool
    scorer: str
    reason: str = ""
    flagged: bool = False
    better_tier: str = ""


@dataclass(frozen=True, slots=True)
class Escalated:
    """The request goes to the next tier. predicted_score: for which the tier was passed over; None for other reasons."""

    from_tier: str
    to_tier: str
    reason: str
    predicted_score: float | None = None


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """The reply continues on another instance at `offset`."""

    tier: str
    from_instance_id: str
    to_instance_id: str
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class TierSummary:
    """The work of one tier on the request. score_reason, flagged: as in Judged."""

    tier: str
    model: str
    instance_id: str
    score: float | None
    threshold: float | None
    accepted: bool
    usage: Usage
    time_s: float
    score_reason: str = ""
    flagged: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event.

    tool_calls, content: if tools were offered, the calls and the text without them; else content is None.
    slo: of a request with an SLO.
    """

    reason: FinishReason
    tier: str
    usage: Usage
    tiers: tuple[TierSummary, ...]
    ttft_s: float | None
    total_s: float
    trace_id: str
    tool_calls: tuple[ToolCall, ...] = ()
    content: str | None = None
    slo: SloResult | None = None


Event = Accepted | TierStarted | TierAdmitted | TierDeclined | Tokens | Judged | Escalated | InstanceChanged | Finished


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
        """The reply as a message of the chat that goes on."""
        return {"role": "assistant", "content": self.content, "tool_calls": self.tool_calls}


@dataclass(frozen=True, slots=True)
class Model:
    """A model that requests can name."""

    id: str
    model: str
    cascade: bool
    max_context_tokens: int
