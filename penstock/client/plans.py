"""Plans, and what the planner and the simulator report. Times are in seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stage:
    """Instances of a tier that serve sequences of from_tokens to to_tokens - 1 tokens, input and output so far."""

    from_tokens: int
    to_tokens: int
    instances: int


@dataclass(frozen=True, slots=True)
class EarlyCheck:
    """An answer that has after_tokens tokens and is not finished is rejected if it scores less than reject_below."""

    after_tokens: int
    reject_below: float


@dataclass(frozen=True, slots=True)
class LongAnswers:
    """Answers of at least from_tokens output tokens are accepted if they score at least threshold, or the tier's own."""

    from_tokens: int
    threshold: float


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of a plan. threshold: lowest score at which an answer is accepted; None for the last tier.

    stages: the length stages; without any, every instance serves all lengths. qoe: D0 to D4 of the QoE model of the stages,
    in seconds. skip_below: the tier is passed over for prompts whose predicted score is lower; None: never. early_checks: of
    answers that are not finished. drafters: models that draft in its workers, by the mesh file; no plan changes them.
    long_answers: which are accepted from a lower score on; None: length does not matter.
    """

    name: str
    model: str
    threshold: float | None
    instances: int
    stages: tuple[Stage, ...] = ()
    qoe: tuple[float, ...] = ()
    skip_below: float | None = None
    early_checks: tuple[EarlyCheck, ...] = ()
    drafters: tuple[str, ...] = ()
    long_answers: LongAnswers | None = None


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
class BurstThreshold:
    """Answers that score more than `score` are accepted, and `tie_share` of those that score exactly that."""

    score: float
    tie_share: float = 1.0


@dataclass(frozen=True, slots=True)
class BurstStep:
    """One step of a burst ladder. thresholds: of each tier but the last. quality: the planned mean score.

    rate_per_s: arrivals of the whole mesh up to which the step is used. tier: the one that limits the rate. tier_share: of
    the requests, those that reach it.
    """

    thresholds: tuple[BurstThreshold, ...]
    quality: float
    rate_per_s: float
    tier: str
    tier_share: float


@dataclass(frozen=True, slots=True)
class BurstLadder:
    """How thresholds give way under a burst. steps: the first has the plan's own thresholds. mean_quality: that the mean over
    `router.burst_window_s` holds."""

    mean_quality: float
    steps: tuple[BurstStep, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of the mesh. judge_unavailable: escalate or accept. prediction: only for plans that the planner computed.

    burst: how thresholds give way under a burst; None: they do not. best_answer: whether the answer with the highest score of
    those that a request has got is delivered, instead of always the last one.
    """

    tiers: tuple[TierPlan, ...]
    scorer: str = ""
    judge_unavailable: str = "escalate"
    revision: int = 0
    source: str = "operator"
    note: str = ""
    created_at: float = 0.0
    prediction: Prediction | None = None
    burst: BurstLadder | None = None
    best_answer: bool = False


@dataclass(frozen=True, slots=True)
class JudgedPrompt:
    """A prompt that every tier has answered. output_tokens, judge_scores (0 to 100): one per tier, in the cascade's order.

    predicted_scores: what a score predictor expects, 0 to 100, one per tier; needed for `skip`. unfinished_scores: one
    per tier, after each of the inputs' `early_after_tokens`, without the last ones where the answer has no more tokens; empty
    for a tier whose unfinished answers were not scored. Needed for `early_error`. qualities: what each tier's answer is
    worth, 0 to 100, where that is not its judge score; the quality of a plan is the mean of these. refused: whether a guard
    of the judge has refused each tier's answer, which is then never accepted as a long one.
    """

    input_tokens: int
    output_tokens: tuple[int, ...]
    judge_scores: tuple[float, ...]
    predicted_scores: tuple[float, ...] = ()
    unfinished_scores: tuple[tuple[float, ...], ...] = ()
    qualities: tuple[float, ...] = ()
    refused: tuple[bool, ...] = ()


TraceRow = tuple[float, int, int] | tuple[float, int, int, int]
"""A request of a trace: arrival_s, input_tokens, output_tokens, and of the prompt the tokens that are cached; default: 0."""


@dataclass(frozen=True, slots=True)
class PlanningInputs:
    """The inputs of planning.

    cluster, cascade: the content of the YAML files of `penstock plan` (`--cluster`, `--models`), without `profiles`.
    trace: the requests, see TraceRow. requests: number of requests to use, selected by `seed`; None: 500. lengths: source of
    the token counts, `quality` (the judged prompts) or `trace`. rate: requests per second; None: the rate of the trace.
    early_after_tokens: after which unfinished answers were scored, ascending.
    """

    cluster: Mapping[str, Any]
    cascade: Mapping[str, Any]
    trace: Sequence[TraceRow]
    judged: Sequence[JudgedPrompt]
    requests: int | None = None
    seed: int = 1
    lengths: str = "quality"
    rate: float | None = None
    early_after_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """Progress of planning. evaluations: routings simulated so far."""

    evaluations: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """`count` replicas, each with `pp` pipeline stages of `tp` shards.

    ep: groups of a stage's GPUs that routed experts are divided between whole; 1: each expert is sliced over all of them.
    attn_dp: groups that have attention and the KV of their own requests each; 1: attention is sliced over all of them.
    gpu: the type of GPU, in a cluster of several; else empty.
    """

    tp: int
    pp: int
    count: int
    ep: int = 1
    attn_dp: int = 1
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class PlannedDrafter:
    """A model that drafts in a tier. acceptance: the share of its tokens that the tier's model is expected to accept."""

    model: str
    acceptance: float
    weight_bytes: float
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What drafts best in a batch. chain: models, small to large; empty, with window 0, where the tier's model alone is best.

    window: tokens that the first model of the chain drafts.
    """

    replies: int
    chain: tuple[str, ...]
    window: int


@dataclass(frozen=True, slots=True)
class ReplicaDrafts:
    """Drafts in replicas of one shape. memory_bytes: of all drafters in one replica, weights and KV. gpu: the type of GPU, in
    a cluster of several; else empty."""

    tp: int
    pp: int
    gpu: str
    memory_bytes: float
    choices: tuple[DraftChoice, ...]


@dataclass(frozen=True, slots=True)
class PlannedSpeculation:
    """What drafts in a tier of a computed plan. drafters: small to large."""

    drafters: tuple[PlannedDrafter, ...]
    max_window: int
    replicas: tuple[ReplicaDrafts, ...]


@dataclass(frozen=True, slots=True)
class PlannedEarlyChecks:
    """Early checks of a tier of a computed plan, and what they do to the judged prompts that reach it.

    meanwhile_tokens: that the tier generates while an unfinished answer is scored. rejected_share: of the answers that would
    not stand, those rejected early; error: of those that would; None where there are no such answers. saved_share: of the
    tier's output tokens. scored_per_answer: unfinished answers that the judge scores.
    """

    checks: tuple[EarlyCheck, ...]
    meanwhile_tokens: int
    rejected_share: float | None
    error: float | None
    saved_share: float
    scored_per_answer: float


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """One tier of a computed plan. threshold: None for the last tier and for a tier that is not used.

    utilisation: the offered rate over the rate that the tier sustains. speculation: None where nothing drafts.
    skip_below: the tier is passed over for prompts whose predicted score is lower; None: never.
    remote_dollars_per_hour: what the tokens of a remote tier cost; None for other tiers and where it is not used.
    early: None without early checks. step_times: where they are from, estimated by data sheets, profiled or stated.
    long_answers: which are accepted from a lower score on; None: length does not matter.
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
    speculation: PlannedSpeculation | None = None
    skip_below: float | None = None
    remote_dollars_per_hour: float | None = None
    early: PlannedEarlyChecks | None = None
    step_times: str = ""
    long_answers: LongAnswers | None = None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles and mean, in seconds."""

    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class Grading:
    """What judging amounts to in a computed plan. requests: answers judged; requests_per_s: None if arrivals have no rate.

    wait: from the end of an answer to its score.
    """

    requests: int
    requests_per_s: float | None
    wait: Percentiles


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best plan of other tiers. latency_p95_s: that the objective means, at its percentile. Other fields: see
    CascadePlan."""

    tiers: tuple[str, ...]
    quality: float
    latency_p95_s: float
    gpus: int
    dollars_per_hour: float | None
    rate_per_s: float | None


@dataclass(frozen=True, slots=True)
class CascadeChoice:
    """How the tiers of a plan were chosen from candidates; docs/candidates.md explains it.

    considered: cascades of the sizes that were asked for. planned: those of them with a plan. left_out: how many of the
    others, by reason. runner_up: None where no plan has other tiers.
    """

    candidates: tuple[str, ...]
    considered: int
    planned: int
    left_out: Mapping[str, int]
    runner_up: RunnerUp | None


@dataclass(frozen=True, slots=True)
class UserLatency:
    """What users feel. first_token: until the first token that a user sees. pace: per token after the first."""

    end_to_end: Percentiles
    first_token: Percentiles
    pace: Percentiles


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """A computed plan; docs/planner.md explains its figures.

    gap: None if it is unknown. breaks_at_rate_per_s, rate_per_s: None if the arrivals have no rate.
    dollars_per_hour: None if the cluster has no price. burst: None if none was asked for, or for burst_reason.
    grading: None if what judges was not stated. choice: how `tiers` were chosen from candidates; None if they were given.
    early_reason: why there are no early checks, where they were asked for. latency_s: that `objective` means, at
    `percentile`. user_latency: None from a planner of an earlier version. best_answer: as in Plan. cached_share: of all
    prompt tokens, those that the plan does not count as computed.
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
    burst: BurstLadder | None = None
    burst_reason: str = ""
    grading: Grading | None = None
    choice: CascadeChoice | None = None
    early_reason: str = ""
    objective: str = "largest-tier"
    percentile: float = 95.0
    latency_s: float = 0.0
    user_latency: UserLatency | None = None
    best_answer: bool = False
    cached_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No plan meets the targets. `best`: the closest value that a plan reaches, a quality, a latency in seconds or a rate.

    binds: what is in the way, min_quality, max_latency_s, rate_per_s or gpus.
    """

    reason: str
    best: float
    binds: str = ""


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
    """The result of a simulation, by tier and end to end. cached_share: see CascadePlan."""

    tiers: tuple[SimulatedTier, ...]
    end_to_end: Percentiles
    quality: float
    requests: int
    user_latency: UserLatency | None = None
    cached_share: float = 0.0


@dataclass(frozen=True, slots=True)
class SequenceInFlight:
    """A sequence in flight. tokens: input and output so far. output_tokens: at its end; 0 if unknown."""

    input_tokens: int
    tokens: int
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StagesVerdict:
    """What a replay of stages showed. The changes are shares of what they were held against; negative is less.

    use_stages: whether the response has several stages. replayed: layouts that were. judged: the best of them, empty if none
    holds its KV and carries its moves. favoured: whether it is better than what it was held against.
    """

    use_stages: bool
    ttft_p50_change: float
    ttft_p95_change: float
    tpot_change: float
    sustained_rate_change: float
    sentence: str
    replayed: int
    judged: tuple[Stage, ...]
    favoured: bool


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Stages and their total QoE (lower is better), compared with one stage and with one instance per stage.

    chain_quality: of one instance per stage; None if there are more instances than ranges. method: exact or heuristic.
    gap: relative distance to the exact result; None if that was not computed. plan: the published plan, if it was published.
    verdict: None where nothing was replayed.
    """

    stages: tuple[Stage, ...]
    quality: float
    one_stage_quality: float
    chain_quality: float | None
    method: str
    gap: float | None
    elapsed_s: float
    plan: Plan | None = None
    verdict: StagesVerdict | None = None
