"""Computed plans: what the planner reports. Times are in seconds, qualities from 0 to 100.

`penstock plan --json` and plan files have the fields of these types, see `planner_service.codecs.plan_file`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.types.deployments import ReplicaGroup
from penstock.types.planning import Dispatch, Goal, Objective
from penstock.types.plans import Prediction
from penstock.types.rules import PlanRules, TierRules
from penstock.types.simulated import Percentiles, SloAttainment, UserLatency


@dataclass(frozen=True, slots=True)
class Interval:
    """Of a percentile over several runs: their mean, and between which it lies with 95 % confidence."""

    mean: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True, slots=True)
class RemoteCost:
    """What the tokens of a remote tier cost."""

    dollars_per_hour: float


@dataclass(frozen=True, slots=True)
class PlannedDrafter:
    """A model that drafts in a tier. acceptance: the share of its tokens that the tier's model is expected to accept."""

    model: str
    acceptance: float
    weights_gb: float
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
    """Drafts in replicas of one shape. memory_gb: of all drafters in one replica, weights and KV. choices: by the replies of
    a
    batch, 1, 2, 4, ... and the largest batch."""

    tp: int
    pp: int
    memory_gb: float
    choices: tuple[DraftChoice, ...]
    gpu: str = ""
    ep: int = 1
    attn_dp: int = 1


@dataclass(frozen=True, slots=True)
class PlannedSpeculation:
    """What drafts in a tier of a computed plan. drafters: small to large."""

    max_window: int
    drafters: tuple[PlannedDrafter, ...]
    replicas: tuple[ReplicaDrafts, ...]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where step times are from: estimated by data sheets, profiled on hardware, or stated of a remote tier.

    arithmetic: of an estimate, the model's; empty for others, whose times have it already. widened: types of GPU in use that
    do not have it, and are taken to compute in 16 bits. engine: by whose CPU it is estimated. fast, slow: between these times
    an estimate 9 of 10 published step times lie; 1 for others.
    """

    source: str
    arithmetic: str = ""
    widened: tuple[str, ...] = ()
    engine: str = ""
    fast: float = 1.0
    slow: float = 1.0

    def __str__(self) -> str:
        """`estimated in fp8, in 16 bits on a100-80gb, for sglang (measured: 0.9 to 1.6 times as long)`."""
        text = f"{self.source} in {self.arithmetic}" if self.arithmetic else self.source
        if self.widened:
            text += f", in 16 bits on {', '.join(self.widened)}"
        if not self.engine:
            return text
        return f"{text}, for {self.engine} (measured: {self.fast:g} to {self.slow:g} times as long)"


@dataclass(frozen=True, slots=True)
class PlannedTier(TierRules):
    """One tier of a computed plan.

    threshold: None for the last tier and for a tier that is not used. remote: None for a tier that GPUs serve.
    share_processed, share_answered: of the requests. p95_s: of its own requests, by itself; the figures from `requests` on:
    as the cascade runs. utilisation: the rate offered to it over what it sustains. busy: the share of time in which its
    replicas are at work at all.
    """

    name: str
    model: str
    gpus: int
    replicas: tuple[ReplicaGroup, ...]
    threshold: float | None = None
    remote: RemoteCost | None = None
    speculation: PlannedSpeculation | None = None
    share_processed: float = 0.0
    share_answered: float = 0.0
    p95_s: float = 0.0
    step_times: StepTimes | None = None
    requests: int = 0
    ttft_s: Percentiles | None = None
    tpot_s: Percentiles | None = None
    latency_s: Percentiles | None = None
    requests_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    preemptions: int = 0
    busy: float = 0.0
    utilisation: float = 0.0

    @property
    def used(self) -> bool:
        """Whether requests visit this tier."""
        return bool(self.replicas) or self.remote is not None

    @property
    def instances(self) -> int:
        """How many workers it has: one for each replica, and one for a remote tier that is used."""
        return 1 if self.remote is not None else sum(group.count for group in self.replicas)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of all GPUs given to tiers, and of the tokens of remote ones. dollars_per_hour: None where no price was given."""

    gpus: int
    dollars_per_hour: float | None = None

    @property
    def words(self) -> str:
        """`5 GPUs and 12.50 dollars per hour`."""
        gpus = f"{self.gpus} GPU{'' if self.gpus == 1 else 's'}"
        return gpus if self.dollars_per_hour is None else f"{gpus} and {self.dollars_per_hour:,.2f} dollars per hour"


@dataclass(frozen=True, slots=True)
class LatencyBand:
    """The latency where all estimated step times are as short, or as long, as published ones have been.

    missed: whether the latency target that was stated is missed at the slow end. kept_for: what a plan takes that keeps it
    there; None where none was found.
    """

    fast_s: float
    slow_s: float
    missed: bool = False
    kept_for: Cost | None = None


@dataclass(frozen=True, slots=True)
class PlannedLatency:
    """The latency that the objective means, at the percentile; `words`: as `p95 end-to-end latency`. interval_s: on other
    stretches of the trace. band: None where no step times are estimated."""

    objective: Objective
    percentile: float
    seconds: float
    words: str = ""
    interval_s: Interval | None = None
    band: LatencyBand | None = None


@dataclass(frozen=True, slots=True)
class Horizon:
    """What the plan was made for: requests, the seconds in which they arrive, and how many latencies that is; the latencies
    that each other stretch lasts on which it was run."""

    requests: int
    seconds: float
    latencies: float | None = None
    run_latencies: float | None = None


@dataclass(frozen=True, slots=True)
class Optimality:
    """proof: enumerated, bounded or searched; see docs/planner.md. over: what it is about. proved: whether it is one.

    gap: how far the best plan may be at most: the share of the latency that it may save, or the points of quality that it
    may win; None where that is unknown. gpu_step: by which the GPUs of a tier grow; above 1, the optimum may lie between two
    steps.
    """

    proved: bool
    over: str
    proof: str
    gap: float | None
    gpu_step: int


@dataclass(frozen=True, slots=True)
class PlanLoad:
    """Requests per second that are offered, and up to which the plan keeps up; `tier` limits it."""

    offered_per_s: float
    sustained_per_s: float
    overloaded: bool
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Judging:
    """What judging amounts to. by: the tier or the judge model. wait_s: from the end of an answer to its score."""

    by: str
    requests: int
    requests_per_s: float | None
    wait_s: Percentiles


@dataclass(frozen=True, slots=True)
class QualityPromise:
    """The quality of a plan on as many new prompts as were judged: what is expected, and with `confidence` at least."""

    confidence: float
    expected_quality: float
    least_quality: float
    prompts: int


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best plan of another form. latency_p95_s: that the objective means, at its percentile. routed: each prompt goes to
    one of the tiers, by its predicted scores."""

    tiers: tuple[str, ...]
    quality: float
    latency_p95_s: float
    cost: Cost
    rate_per_s: float | None
    routed: bool = False


@dataclass(frozen=True, slots=True)
class CascadeChoice:
    """How the tiers of a plan were chosen from candidates, `tiers`; docs/candidates.md explains it.

    cascades: of the sizes that were asked for. planned: those of them with a plan. left_out: how many of the others, by
    reason: gpus, judge, min_quality, max_latency_s, bound or no_plan. runner_up: None where no plan has other tiers.
    """

    tiers: tuple[str, ...]
    min_tiers: int
    max_tiers: int
    cascades: int
    planned: int
    left_out: Mapping[str, int]
    runner_up: RunnerUp | None


@dataclass(frozen=True, slots=True)
class LargestAlone:
    """The largest model alone on the fewest GPUs that sustain the rate: what a cheapest plan keeps to
    without a latency target.

    latency_s: that the objective means, at its percentile. limit_s: what the plan may take. assumed: it needs more GPUs than
    there are.
    """

    tier: str
    quality: float
    latency_s: float
    limit_s: float
    cost: Cost
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class AloneQualities:
    """The quality of the first tier alone, of the last, and of the best answer of each prompt."""

    first: float
    last: float
    most: float


@dataclass(frozen=True, slots=True)
class NextStep:
    """What at least a point more quality takes, all else as it is planned.

    min_quality: that was requested. gpus, dollars_per_hour, latency_s, rate_per_s: more than this plan has; dollars None
    without prices, a rate None where the arrivals have none. reason: why there is no plan; else empty.
    """

    min_quality: float
    gpus: int = 0
    dollars_per_hour: float | None = None
    latency_s: float = 0.0
    rate_per_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CascadePlan(PlanRules):
    """A computed plan; docs/planner.md explains its figures.

    latency_p95_s: of the slowest tier. *_interval_s: on other stretches of the trace; None where there were none.
    candidates: None if the tiers were given. infeasible: why tiers fit nowhere, by name. rate_per_s, breaks_at_rate: None
    where arrivals have no rate; the second is what the first tier to break sustains. seconds: that planning took.
    cached_share: of all prompt tokens, those that count as cached. load, judging: None where there is none. largest_alone:
    where the plan keeps to it. slo: by class, where there are some. verdict: the plan in a sentence.
    """

    tiers: tuple[PlannedTier, ...]
    quality: float
    latency_p95_s: float
    end_to_end_p95_s: float
    objective: Objective = Objective.LARGEST_TIER
    goal: Goal = Goal.LATENCY
    dispatch: Dispatch = Dispatch.CAPACITY
    target: str = ""
    workload_digest: str = ""
    latency: PlannedLatency | None = None
    user_latency_s: UserLatency | None = None
    latency_p95_interval_s: Interval | None = None
    end_to_end_p95_interval_s: Interval | None = None
    horizon: Horizon | None = None
    cost: Cost | None = None
    promise: QualityPromise | None = None
    optimality: Optimality | None = None
    load: PlanLoad | None = None
    grading: Judging | None = None
    candidates: CascadeChoice | None = None
    alone: AloneQualities | None = None
    infeasible: Mapping[str, str] = field(default_factory=dict)
    binds: str = ""
    cluster: str = ""
    rate_per_s: float | None = None
    breaks_at_rate: float | None = None
    cached_share: float = 0.0
    evaluations: int = 0
    simulations: int = 0
    seconds: float = 0.0
    feasible: bool = False
    verdict: str = ""
    next_step: NextStep | None = None
    largest_alone: LargestAlone | None = None
    slo: tuple[SloAttainment, ...] = ()

    @property
    def gpus(self) -> int:
        return sum(tier.gpus for tier in self.tiers)

    @property
    def prediction(self) -> Prediction:
        """What the plan is expected to reach, as plans of a mesh have it."""
        reached = (self.quality, self.latency_p95_s, self.end_to_end_p95_s)
        return Prediction(self.objective.value, self.target, self.workload_digest, *reached)


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """evaluations: routings simulated so far."""

    evaluations: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No plan meets the targets. best: the nearest that can be had of what binds: a quality, a latency in seconds or a rate.

    binds: what is in the way, min_quality, max_latency_s, rate_per_s or gpus.
    """

    reason: str
    best: float
    binds: str = ""


PlanEvent = PlanProgress | CascadePlan | Unreachable
"""Of a plan that is computed: how far it is, and at the end the plan or why there is none."""
