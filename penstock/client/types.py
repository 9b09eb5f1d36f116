"""What goes in and comes out of the clients. Times in seconds."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""A chat message: {"role": "user", "content": "..."}. An assistant's may have `tool_calls`, each a ToolCall or a mapping as
in OpenAI's API; one of role `tool` has the `tool_call_id` that it answers."""

Prompt = str | Sequence[Message] | Sequence[int]
"""A question as text (sent as one user message), a whole chat, or token ids to continue."""


class FinishReason(enum.Enum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SloPhase:
    """From output token `from_output_token` on, a token at least every `time_per_output_token_s` on average."""

    from_output_token: int
    time_per_output_token_s: float


@dataclass(frozen=True, slots=True)
class Slo:
    """A promise about latency to ask for."""

    time_to_first_token_s: float | None = None
    phases: tuple[SloPhase, ...] = ()


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
    """How to answer. What is None is left to the server.

    model: `cascade`, or a tier's name.
    temperature: 0 (greedy) to 2. top_p: over 0 to 1.
    seed: the same seed and prompt give the same text.
    max_tokens: of the reply. stop: the reply ends before the first of these.
    top_logprobs: None reports no logprobs; 0 to 20 also that many likelier tokens.
    raw: the prompt text is continued as it stands, without a chat template.
    priority: -100 to 100; higher goes first among waiting requests.
    tools: what the model may call.
    tool_choice: auto (it decides), none, required, or the name of the tool to call; None: auto.
    parallel_tool_calls: several calls in one reply are allowed.
    structured_output: the form that the reply must have.
    """

    model: str = "cascade"
    temperature: float | None = None
    top_p: float | None = None
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
    """The chosen token and likelier ones at one output position."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The router has the request."""

    request_id: str
    plan_revision: int
    seed: int


@dataclass(frozen=True, slots=True)
class TierStarted:
    """A tier works on an answer."""

    tier: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class TierAdmitted:
    """An instance serves the request; `slo_kept`: with the latency that was asked for."""

    tier: str
    instance_id: str
    slo_kept: bool


@dataclass(frozen=True, slots=True)
class TierDeclined:
    """An instance cannot keep the latency that was asked for."""

    tier: str
    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Part of the answer: `text`, and the tokens behind it from output position `offset` on."""

    tier: str
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Judged:
    """A tier's answer was scored (`score` None: the judge could not be reached)."""

    tier: str
    score: float | None
    threshold: float
    accepted: bool
    scorer: str


@dataclass(frozen=True, slots=True)
class Escalated:
    """The next tier tries."""

    from_tier: str
    to_tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """The reply goes on at another instance, at the same offset."""

    tier: str
    from_instance_id: str
    to_instance_id: str
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class TierSummary:
    """What one tier did for the request."""

    tier: str
    model: str
    instance_id: str
    score: float | None
    threshold: float | None
    accepted: bool
    usage: Usage
    time_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event.

    tool_calls, content: where tools were offered, the calls and the text without them; else content is None.
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


Event = Accepted | TierStarted | TierAdmitted | TierDeclined | Tokens | Judged | Escalated | InstanceChanged | Finished


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. `tiers`: every tier that worked on it; `tier`: whose answer it is.

    text: as the model wrote it, calls included. tool_calls: the calls in it. content: the text without them.
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

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message of the chat that goes on."""
        return {"role": "assistant", "content": self.content, "tool_calls": self.tool_calls}


@dataclass(frozen=True, slots=True)
class Model:
    """A model to name in requests."""

    id: str
    model: str
    cascade: bool
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier, as a router sees it. answered, escalated: by this router since it started."""

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
    """A length stage, counted from 0: sequences of from_tokens to to_tokens - 1 tokens. to_tokens is the instance's own."""

    stage: int
    from_tokens: int
    to_tokens: int


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One process of the mesh. state: ready, draining or ejected. place: the length stage that a worker serves."""

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


@dataclass(frozen=True, slots=True)
class MeshStatus:
    """The mesh as one router sees it. connected: whether Redis is in reach; state_age_s: since when it is not.

    migrations: replies that went on at another instance with their KV. advice_unmet: times that a worker advised a move and
    the reply stayed.
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


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a trace; `start_s` since the epoch."""

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
    """What became of a move. refusal: why the reply went on where it was, or None where it has moved.

    offset: output tokens made before. stall_s: from the last step at the old instance to the first sign of the new one.
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
    """Instances of a tier for sequences of from_tokens to to_tokens - 1 tokens, input and output so far."""

    from_tokens: int
    to_tokens: int
    instances: int


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of a plan. threshold: from this score on its answers stand; None on the last tier.

    stages: which instances serve which lengths; none: every instance serves every length. qoe: D0 to D4 of the model that the
    stages were laid out by, seconds.
    """

    name: str
    model: str
    threshold: float | None
    instances: int
    stages: tuple[Stage, ...] = ()
    qoe: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan was computed for, and what it was expected to reach. latency_p95_s: of the slowest tier."""

    objective: str
    target: str
    workload_digest: str
    quality: float
    latency_p95_s: float
    end_to_end_p95_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What the mesh follows. judge_unavailable: escalate or accept. prediction: None for a plan that nobody computed."""

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
    """A prompt that every tier has answered: tokens, and scores from 0 to 100, in the cascade's order."""

    input_tokens: int
    output_tokens: tuple[int, ...]
    judge_scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlanningInputs:
    """What a cascade is to be planned for.

    cluster, cascade: what the YAML files of `penstock plan` say (`--cluster`, `--models`), but for `profiles`.
    trace: (arrival_s, input_tokens, output_tokens) of each request. requests: so many of these, from a place drawn by `seed`;
    None: 500. lengths: `quality` (of the judged prompts) or `trace`. rate: requests per second; None: the trace's own.
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
    """evaluations: routings deployed and simulated so far."""

    evaluations: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """`count` replicas of `tp` shards of each of `pp` stages."""

    tp: int
    pp: int
    count: int


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """threshold: None on the last tier, and on one that is passed over (not used)."""

    name: str
    model: str
    gpus: int
    replicas: tuple[ReplicaGroup, ...]
    threshold: float | None
    used: bool
    share_processed: float
    share_answered: float
    latency_p95_s: float


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """A plan that the planner has computed; docs/planner.md explains its figures."""

    tiers: tuple[PlannedTier, ...]
    quality: float
    latency_p95_s: float
    end_to_end_p95_s: float
    proof: str
    gap: float
    binds: str
    evaluations: int
    simulations: int
    seconds: float
    workload_digest: str
    tested_quality: float | None


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No plan meets the target; `best` is the nearest that can be had: a quality, or a latency in seconds."""

    reason: str
    best: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles and mean, in seconds."""

    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class SimulatedTier:
    """What one tier did in virtual time."""

    requests: int
    ttft: Spread
    tpot: Spread
    latency: Spread
    requests_per_s: float
    output_tokens_per_s: float
    utilisation: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A deployment in virtual time, by tier and end to end."""

    tiers: tuple[SimulatedTier, ...]
    end_to_end: Spread
    quality: float
    requests: int


@dataclass(frozen=True, slots=True)
class SequenceInFlight:
    """A sequence to plan stages by. tokens: input and output so far. output_tokens: when it ends; 0: not known."""

    input_tokens: int
    tokens: int
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Stages and their total QoE, the less the better, beside that of one stage and of one instance per stage.

    chain_quality: None where there are more instances than ranges. method: exact or heuristic. gap: above the exact answer's
    quality, relative; None where that was not computed. plan: with these stages, where they were published.
    """

    stages: tuple[Stage, ...]
    quality: float
    one_stage_quality: float
    chain_quality: float | None
    method: str
    gap: float | None
    elapsed_s: float
    plan: Plan | None = None
