"""A planning question: where a cascade is to run, what it is to serve, and what its plan is to reach.

The defaults are here and nowhere else. Ranges are checked by `ranges.range_problems`; the planner checks what fields mean
together.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Self

from penstock.types.limits import MAX_TOKENS
from penstock.types.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SCORE, Within
from penstock.types.rules import RuleOptions

SHARE = Within(0, 1)
PRICE = Within(0, 1e6)  # dollars per million tokens
JUDGE_TOKENS = 1_000_000  # longer than any model's context


class Goal(enum.StrEnum):
    """What is made best: least latency, most quality, fewest GPUs, or the highest rate."""

    LATENCY = "latency"
    QUALITY = "quality"
    COST = "cost"
    RATE = "rate"


class Objective(enum.StrEnum):
    """Which latency is meant.

    LARGEST_TIER: of the slowest tier (the paper's L), from the arrival there to the last token. END_TO_END: from a request's
    arrival to its final answer, over all tiers visited, judging included. FIRST_TOKEN: to the first token that its user
    sees: a held answer is seen when its judge has accepted it, an answer that is streamed from its first token on. PACE:
    seconds per token after the first, of the reply, as its tier writes it; an answer of one token has none.
    """

    LARGEST_TIER = "largest-tier"
    END_TO_END = "end-to-end"
    FIRST_TOKEN = "first-token"
    PACE = "pace"


class Dispatch(enum.StrEnum):
    """How a tier's requests are distributed over its replicas.

    CAPACITY: in proportion to the capacity of replicas. ROUND_ROBIN: in turn. PENDING_WORK: as routers do it, where the least
    work is pending; for simulations.
    """

    CAPACITY = "capacity"
    ROUND_ROBIN = "round-robin"
    PENDING_WORK = "pending-work"


class LengthSource(enum.StrEnum):
    """Whether token counts are those of the judged prompts, or of the trace: the same for all tiers."""

    QUALITY = "quality"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A data sheet; with a name alone, that of the planner's catalogue.

    tflops: dense, 16 bit. link_gb_per_s: between two GPUs of a node, one way. compute_efficiency, memory_efficiency: the
    shares of the sheet's figures that kernels reach. fp8_tflops to int4_tops: dense, in narrower numbers; None where engines
    compute in 16 bit instead. host_speed: of a core of the machines that have it, over those that have A100.
    """

    name: str = ""
    memory_gb: Annotated[float, NOT_NEGATIVE] = 0.0
    memory_gb_per_s: Annotated[float, NOT_NEGATIVE] = 0.0
    tflops: Annotated[float, NOT_NEGATIVE] = 0.0
    link_gb_per_s: Annotated[float, NOT_NEGATIVE] = 0.0
    compute_efficiency: Annotated[float, Within(0, 1, above=True)] = 0.6
    memory_efficiency: Annotated[float, Within(0, 1, above=True)] = 0.8
    fp8_tflops: Annotated[float | None, POSITIVE] = None
    int8_tops: Annotated[float | None, POSITIVE] = None
    fp4_tflops: Annotated[float | None, POSITIVE] = None
    int4_tops: Annotated[float | None, POSITIVE] = None
    host_speed: Annotated[float, POSITIVE] = 1.0


@dataclass(frozen=True, slots=True)
class GpuType:
    """Nodes with GPUs of one type. name: what plans call it, else the GPU's; spot GPUs are a type with its own price.

    node_link_gb_per_s: between nodes, one way and per GPU. dollars_per_gpu_hour: for all types or for none.
    """

    gpu: Gpu
    nodes: Annotated[int, COUNT] = 0
    gpus_per_node: Annotated[int, COUNT] = 0
    node_link_gb_per_s: Annotated[float, POSITIVE] = 25.0
    dollars_per_gpu_hour: Annotated[float | None, NOT_NEGATIVE] = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs by type. No replica spans two types."""

    types: tuple[GpuType, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """A model's published config; with a name alone, that of the planner's catalogue.

    parameters, active, expert_parameters, attention: billions. active: used for one token; None for all but the experts that
    it does not use. bytes_per_parameter: None for 2; needed with an arithmetic other than 16bit. kv_per_layer_bytes: None
    for two values per KV head in 16 bit. arithmetic: of the products with weights, 16bit, fp8, int8, fp4 or int4. experts:
    routed, of a layer; experts_per_token; expert_parameters: in the routed experts of all layers: all of these or none.
    Without them, a batch reads the active parameters of each of its tokens, all parameters at most. attention: None for the
    projections of these heads. name: of a tier's own model, where it is not the tier's.
    """

    name: str = ""
    layers: Annotated[int, NOT_NEGATIVE] = 0
    hidden: Annotated[int, NOT_NEGATIVE] = 0
    heads: Annotated[int, NOT_NEGATIVE] = 0
    kv_heads: Annotated[int, NOT_NEGATIVE] = 0
    head_dim: Annotated[int, NOT_NEGATIVE] = 0
    parameters: Annotated[float, NOT_NEGATIVE] = 0.0
    active: Annotated[float | None, POSITIVE] = None
    bytes_per_parameter: Annotated[float | None, POSITIVE] = None
    kv_per_layer_bytes: Annotated[float | None, POSITIVE] = None
    arithmetic: str = "16bit"
    experts: Annotated[int | None, COUNT] = None
    experts_per_token: Annotated[int | None, COUNT] = None
    expert_parameters: Annotated[float | None, POSITIVE] = None
    attention: Annotated[float | None, POSITIVE] = None


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """max_running: requests in one batch at most. max_step_tokens: per step at most; longer prompts are chunked."""

    max_running: Annotated[int, COUNT] = 256
    max_step_tokens: Annotated[int, COUNT] = 2048
    block_tokens: Annotated[int, COUNT] = 16


@dataclass(frozen=True, slots=True)
class EngineRuntime:
    """memory_share: of a GPU's memory, what may be used. activation_gb: of each GPU, in addition to weights and KV.

    engine: of the planner's catalogue, by which step times count the CPU; step_overhead_ms: in addition.
    """

    step_overhead_ms: Annotated[float, NOT_NEGATIVE] = 2.0
    memory_share: Annotated[float, Within(0, 1, above=True)] = 0.92
    activation_gb: Annotated[float, NOT_NEGATIVE] = 1.0
    engine: str = "sglang"


@dataclass(frozen=True, slots=True)
class MeasuredReplica:
    """A replica measured by `penstock profile`: a step takes what new tokens take by the knots, linear between them, and
    context_token_s, pair_s and gap_s for what their names say; see StepLatencyModel.

    ep, attn_dp: as of ReplicaGroup. gpu: that it was measured on; needed where a cluster has several types.
    """

    knot_tokens: tuple[float, ...]
    knot_s: tuple[float, ...]
    tp: Annotated[int, COUNT] = 0
    pp: Annotated[int, COUNT] = 0
    kv_tokens: Annotated[int, COUNT] = 0
    engine: EngineBatch = EngineBatch()
    context_token_s: Annotated[float, NOT_NEGATIVE] = 0.0
    pair_s: Annotated[float, NOT_NEGATIVE] = 0.0
    gap_s: Annotated[float, NOT_NEGATIVE] = 0.0
    ep: Annotated[int, COUNT] = 1
    attn_dp: Annotated[int, COUNT] = 1
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class Drafter:
    """A model that drafts; one that is not of the catalogue needs a name. acceptance: the share of its tokens that the tier's
    model accepts."""

    model: Model
    acceptance: Annotated[float | None, SHARE] = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """Models that draft in each replica of a tier: at most 4, none of them the tier's own.

    max_window: tokens drafted for a reply in one step at most. context_tokens: of a reply, for which the chain and the window
    are chosen.
    """

    drafters: tuple[Drafter, ...] = ()
    max_window: Annotated[int, Within(1, 32)] = 7
    context_tokens: Annotated[int, COUNT] = 512


@dataclass(frozen=True, slots=True)
class RemoteApi:
    """An API that others run. It takes no GPUs, and needs prices of all GPUs.

    first_token_s, token_s: until the first token and for each later one, whatever the load. requests_per_minute,
    tokens_per_minute: its limits, input and output; None for none.
    """

    dollars_per_million_input_tokens: Annotated[float | None, PRICE] = None
    dollars_per_million_output_tokens: Annotated[float | None, PRICE] = None
    first_token_s: Annotated[float | None, POSITIVE] = None
    token_s: Annotated[float | None, NOT_NEGATIVE] = None
    requests_per_minute: Annotated[float | None, POSITIVE] = None
    tokens_per_minute: Annotated[float | None, POSITIVE] = None


@dataclass(frozen=True, slots=True)
class CascadeTier:
    """One tier of the cascade. measured: a tier that has some is planned with these replicas only; a models file names their
    `profiles`. speculation: not with measured replicas, which are measured with what drafts. remote: an API serves the tier;
    the model's name is the one there. draft_acceptance: of the next token of a rejected answer, if those before it are
    accepted; 0: drafts are not counted."""

    name: str
    model: Model
    measured: tuple[MeasuredReplica, ...] = ()
    speculation: Speculation = Speculation()
    remote: RemoteApi | None = None
    draft_acceptance: Annotated[float, SHARE] = 0.0


@dataclass(frozen=True, slots=True)
class CascadeJudge:
    """What judges the answers of all tiers but the last, as a load: a tier, or processes with a model of their own.

    tier: is sent a grading request for each answer, of question_tokens (150) in addition to prompt and answer; a grade has
    reply_tokens (4). model: of the judge service, whose `replicas` (1) take pass_s (0) + token_s * its tokens for a forward
    pass of at most max_batch (32) answers and max_batch_tokens (4096).
    """

    tier: str = ""
    question_tokens: Annotated[int | None, Within(0, JUDGE_TOKENS)] = None
    reply_tokens: Annotated[int | None, Within(1, 65_536)] = None
    model: str = ""
    replicas: Annotated[int | None, Within(1, 1024)] = None
    pass_s: Annotated[float | None, NOT_NEGATIVE] = None
    token_s: Annotated[float | None, POSITIVE] = None
    max_batch: Annotated[int | None, Within(1, JUDGE_TOKENS)] = None
    max_batch_tokens: Annotated[int | None, Within(64, JUDGE_TOKENS)] = None


@dataclass(frozen=True, slots=True)
class Cascade:
    """The tiers from the cheapest to the most expensive. judge_s: for scoring an answer, in addition to the load of `judge`;
    judge: None where judging loads nothing."""

    tiers: tuple[CascadeTier, ...] = ()
    judge_s: Annotated[float, Within(0, 3600)] = 0.0
    runtime: EngineRuntime = EngineRuntime()
    engine: EngineBatch = EngineBatch()
    judge: CascadeJudge | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Columns of equal length, by request; need not be sorted. cached_tokens: of each prompt, the first tokens whose KV an
    engine has when the request comes, less than input_tokens; empty for none."""

    arrival_s: Annotated[tuple[float, ...], Within()] = ()
    input_tokens: Annotated[tuple[int, ...], Within(1, MAX_TOKENS)] = ()
    output_tokens: Annotated[tuple[int, ...], Within(1, MAX_TOKENS)] = ()
    cached_tokens: Annotated[tuple[int, ...], NOT_NEGATIVE] = ()

    @classmethod
    def of(cls, requests: Iterable[tuple[float, int, int] | tuple[float, int, int, int]]) -> Self:
        """Of rows: arrival_s, input_tokens, output_tokens, and cached_tokens where it is not 0."""
        rows = [(*row, 0)[:4] for row in requests]
        arrival_s, inputs, outputs, cached = zip(*rows, strict=True) if rows else ((),) * 4
        return cls(arrival_s, inputs, outputs, cached if any(cached) else ())


@dataclass(frozen=True, slots=True)
class JudgedPrompt:
    """A prompt that every tier has answered; one value per tier, in the cascade's order.

    predicted_scores: what a score predictor expects; needed to skip tiers. qualities: what each answer is worth, where
    that is not its judge score; the quality of a plan is the mean of these. refused: whether a guard of the judge has refused
    the answer, which is then never accepted as a long one.
    """

    input_tokens: Annotated[int, Within(0, MAX_TOKENS)]
    output_tokens: Annotated[tuple[int, ...], Within(0, MAX_TOKENS)]
    judge_scores: Annotated[tuple[float, ...], SCORE]
    predicted_scores: Annotated[tuple[float, ...], SCORE] = ()
    qualities: Annotated[tuple[float, ...], SCORE] = ()
    refused: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class JudgedPrompts:
    """What each tier answered on typical prompts. All prompts have predicted scores, qualities or refusals, or none has."""

    prompts: tuple[JudgedPrompt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a plan is to reach, and how it is looked for.

    min_quality: mean quality of the accepted answers. max_latency_s: of the objective's latency, at `percentile`; one of
    both at least; for the goal cost, None for 1.2 times that of the largest model alone on the fewest GPUs within
    max_utilisation. goal: None for cost with min_quality and for quality without; for latency with min_quality alone and
    allow_overload or the objective largest tier. max_utilisation: of what a tier sustains, the share that its requests may
    take. allow_overload: plan although no plan sustains the rate. gpus: at most so many of the cluster's; None for all.
    confidence: with this probability min_quality holds for as many new prompts as were judged; None: for the judged ones.
    requests: of the stretch of the trace that is planned for; None for as many as come in 20 latencies, from 500 (or all of a
    shorter trace) to 6000, for a cheapest plan 40,000 (60 per GPU and 100,000 on large clusters), for which a short trace is
    read over and over. seed: of that stretch and of the prompts drawn. runs: other stretches that the plan is run on. rate:
    arrivals per second; None for the trace's. ignore_cached: prompts are computed whole, whatever the trace has cached.
    max_tiers: the tiers are candidates, of which a cascade has so many at most, up to three; None: it has all of them, of
    which up to three serve. min_tiers: and so many at least; None for 1. search_s: seconds after which no further form,
    drafter or rule is tried, once one is planned; None: all are.
    """

    min_quality: Annotated[float | None, SCORE] = None
    max_latency_s: Annotated[float | None, Within(0, 1e6, above=True)] = None
    goal: Goal | None = None
    objective: Objective = Objective.END_TO_END
    percentile: Annotated[float, Within(50, 100, below=True)] = 95.0
    max_utilisation: Annotated[float, Within(0, 1, above=True)] = 0.75
    allow_overload: bool = False
    gpus: Annotated[int | None, Within(1, 1_000_000_000)] = None
    confidence: Annotated[float | None, Within(0.5, 1, below=True)] = None
    dispatch: Dispatch = Dispatch.CAPACITY
    requests: Annotated[int | None, COUNT] = None
    seed: Annotated[int, Within(0, 2**63 - 1)] = 1
    runs: Annotated[int, Within(0, 100)] = 5
    lengths: LengthSource = LengthSource.QUALITY
    rate: Annotated[float | None, Within(0, 1e6, above=True)] = None
    ignore_cached: bool = False
    max_tiers: Annotated[int | None, COUNT] = None
    min_tiers: Annotated[int | None, COUNT] = None
    search_s: Annotated[float | None, Within(0, 1e6, above=True)] = None
    rules: RuleOptions = field(default_factory=RuleOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningQuestion(PlanOptions):
    """All that a plan depends on: the options, and the data that files hold.

    Example:
        >>> cluster = Cluster((GpuType(Gpu("h100"), nodes=1, gpus_per_node=8),))
        >>> tiers = CascadeTier("small", Model("llama-3.1-8b")), CascadeTier("large", Model("llama-3.1-70b"))
        >>> judged = JudgedPrompts((JudgedPrompt(100, (50, 60), (60.0, 80.0)), JudgedPrompt(200, (70, 80), (90.0, 95.0))))
        >>> trace = Trace.of((i / 4, 100, 50) for i in range(100))
        >>> question = PlanningQuestion(
        ...     cluster=cluster, models=Cascade(tiers), trace=trace, quality=judged, min_quality=85
        ... )
        >>> question.max_utilisation
        0.75
    """

    confidence: Annotated[float | None, Within(0.5, 1, below=True)] = 0.9
    cluster: Cluster = field(default_factory=Cluster)
    models: Cascade = field(default_factory=Cascade)
    trace: Trace = field(default_factory=Trace)
    quality: JudgedPrompts = field(default_factory=JudgedPrompts)
