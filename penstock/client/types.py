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
    trace: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a reply."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0


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
    """The router has accepted the request."""

    request_id: str
    plan_revision: int
    seed: int


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
    """

    tier: str
    score: float | None
    threshold: float
    accepted: bool
    scorer: str
    reason: str = ""
    flagged: bool = False


@dataclass(frozen=True, slots=True)
class Escalated:
    """The request goes to the next tier."""

    from_tier: str
    to_tier: str
    reason: str


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


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier as seen by a router. answered, escalated: counts of this router since it started."""

    name: str
    model: str
    threshold: float | None
    planned_instances: int
    live_instances: int
    running: int
    queued: int
    output_tokens_per_s: float
    answered: int
    escalated: int


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The length stage of an instance, numbered from 0, for sequences of from_tokens to to_tokens - 1 tokens."""

    stage: int
    from_tokens: int
    to_tokens: int


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One service of the mesh. state: ready, draining or ejected. place: the length stage that a worker serves.

    processes: that serve under this id and address; 1 but for routers of several processes. admin_address: of its
    administrative listener.
    """

    instance_id: str
    role: str
    tier: str
    address: str
    engine: str
    state: str
    running: int
    queued: int
    free_kv_blocks: int
    kv_blocks: int
    output_tokens_per_s: float
    age_s: float
    place: StagePlace | None = None
    processes: int = 1
    admin_address: str = ""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What the requests of one key used at one tier. requests: replies of the tier, accepted or not.

    tier_s: time that requests spent at the tier, summed. cost: by the prices of the mesh file; 0 without prices.
    """

    tenant: str
    key_id: str
    tier: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    tier_s: float
    cost: float


@dataclass(frozen=True, slots=True)
class RouterProcessStatus:
    """One of a router's processes. answering: False while it starts or is stuck; no sum has what it counts then."""

    index: int
    instance_id: str
    answering: bool
    active: int
    waiting: int
    finished: int


@dataclass(frozen=True, slots=True)
class SloCounts:
    """Requests with an SLO that have ended. attained, broken: a worker had promised to keep it."""

    attained: int = 0
    broken: int = 0
    best_effort: int = 0
    declined: int = 0


@dataclass(frozen=True, slots=True)
class MeshStatus:
    """The mesh as seen by one router.

    connected: whether Redis is reachable. state_age_s: for how long it has been unreachable. processes: of this router, if it
    has several; its counters are the sum over those that respond.
    migrations: replies that moved to another instance with their KV. advice_unmet: moves that a worker advised and that
    failed.
    """

    router_id: str
    plan_revision: int
    connected: bool
    state_age_s: float
    tiers: tuple[TierStatus, ...]
    instances: tuple[InstanceStatus, ...]
    active: int
    waiting: int
    finished: int
    failed: int
    rejected: int
    failovers: int
    requests_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    migrations: int = 0
    advice_unmet: int = 0
    processes: tuple[RouterProcessStatus, ...] = ()
    slo: SloCounts = field(default_factory=SloCounts)


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a trace. `start_s` is Unix time."""

    span_id: str
    parent_span_id: str
    name: str
    service: str
    start_s: float
    duration_s: float
    failed: bool
    status_message: str
    attributes: dict[str, str] = field(default_factory=dict)
    events: tuple[tuple[str, float], ...] = ()


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


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one request, in order of start."""

    trace_id: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Instances of a tier that serve sequences of from_tokens to to_tokens - 1 tokens, input and output so far."""

    from_tokens: int
    to_tokens: int
    instances: int


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of a plan. threshold: lowest score at which an answer is accepted; None for the last tier.

    stages: the length stages; without any, every instance serves all lengths. qoe: D0 to D4 of the QoE model of the stages,
    in seconds.
    """

    name: str
    model: str
    threshold: float | None
    instances: int
    stages: tuple[Stage, ...] = ()
    qoe: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """The goal of a computed plan and its predicted figures. latency_p95_s: of the slowest tier."""

    objective: str
    target: str
    workload_digest: str
    quality: float
    latency_p95_s: float
    end_to_end_p95_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of the mesh. judge_unavailable: escalate or accept. prediction: only for plans that the planner computed."""

    tiers: tuple[TierPlan, ...]
    scorer: str = ""
    judge_unavailable: str = "escalate"
    revision: int = 0
    source: str = "operator"
    note: str = ""
    created_at: float = 0.0
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True)
class JudgedPrompt:
    """A prompt that every tier has answered. output_tokens, judge_scores (0 to 100): one per tier, in the cascade's order."""

    input_tokens: int
    output_tokens: tuple[int, ...]
    judge_scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlanningInputs:
    """The inputs of planning.

    cluster, cascade: the content of the YAML files of `penstock plan` (`--cluster`, `--models`), without `profiles`.
    trace: (arrival_s, input_tokens, output_tokens) of each request. requests: number of requests to use, selected by `seed`;
    None: 500. lengths: source of the token counts, `quality` (the judged prompts) or `trace`. rate: requests per second;
    None: the rate of the trace.
    """

    cluster: Mapping[str, Any]
    cascade: Mapping[str, Any]
    trace: Sequence[tuple[float, int, int]]
    judged: Sequence[JudgedPrompt]
    requests: int | None = None
    seed: int = 1
    lengths: str = "quality"
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """Progress of planning. evaluations: routings simulated so far."""

    evaluations: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """`count` replicas, each with `pp` pipeline stages of `tp` shards."""

    tp: int
    pp: int
    count: int


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """One tier of a computed plan. threshold: None for the last tier and for a tier that is not used.

    utilisation: the offered rate over the rate that the tier sustains.
    """

    name: str
    model: str
    gpus: int
    replicas: tuple[ReplicaGroup, ...]
    threshold: float | None
    used: bool
    share_processed: float
    share_answered: float
    latency_p95_s: float
    utilisation: float = 0.0


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """A computed plan; docs/planner.md explains its figures.

    gap: None if it is unknown. breaks_at_rate_per_s, rate_per_s: None if the arrivals have no rate.
    dollars_per_hour: None if the cluster has no price.
    """

    tiers: tuple[PlannedTier, ...]
    quality: float
    latency_p95_s: float
    end_to_end_p95_s: float
    proof: str
    gap: float | None
    binds: str
    evaluations: int
    simulations: int
    seconds: float
    workload_digest: str
    tested_quality: float | None
    goal: str = "latency"
    breaks_at_rate_per_s: float | None = None
    rate_per_s: float | None = None
    dollars_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No plan meets the targets. `best`: the closest value that a plan reaches, a quality, a latency in seconds or a rate."""

    reason: str
    best: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles and mean, in seconds."""

    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class SimulatedTier:
    """One tier of a simulation."""

    requests: int
    ttft: Percentiles
    tpot: Percentiles
    latency: Percentiles
    requests_per_s: float
    output_tokens_per_s: float
    utilisation: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation, by tier and end to end."""

    tiers: tuple[SimulatedTier, ...]
    end_to_end: Percentiles
    quality: float
    requests: int


@dataclass(frozen=True, slots=True)
class SequenceInFlight:
    """A sequence in flight. tokens: input and output so far. output_tokens: at its end; 0 if unknown."""

    input_tokens: int
    tokens: int
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Stages and their total QoE (lower is better), compared with one stage and with one instance per stage.

    chain_quality: of one instance per stage; None if there are more instances than ranges. method: exact or heuristic.
    gap: relative distance to the exact result; None if that was not computed. plan: the published plan, if it was published.
    """

    stages: tuple[Stage, ...]
    quality: float
    one_stage_quality: float
    chain_quality: float | None
    method: str
    gap: float | None
    elapsed_s: float
    plan: Plan | None = None
