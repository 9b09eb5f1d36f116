"""A cascade plan from a cluster, models, arrivals and judged prompts: what `penstock plan` computes. No I/O."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner_service.deployment.search import Strategy
from planner_service.routing.bilevel import Deployer, Solution, Unreachable, least_latency, most_quality
from planner_service.routing.confidence import Promise, promised
from planner_service.routing.end_to_end import least_end_to_end
from planner_service.routing.quality import JudgedSample, route
from planner_service.simulator import Dispatch, EngineLimits, Replica, Report, Workload, report, serve
from planner_service.simulator.workload import Floats
from planner_service.sustained_load import SustainedLoad, sustained_load
from services.domain.errors import invalid
from services.domain.hardware import ClusterSpec, ModelSpec, ReplicaShape, Runtime, fit, roofline

PIPELINES = (1, 2, 3, 4, 6, 8)
LEAST_REQUESTS = 20  # to plan on: with fewer, the 95th percentile is the slowest request


class Objective(enum.Enum):
    """Which latency a plan makes small: p95 of the slowest tier (the paper's L), or what a user feels."""

    LARGEST_TIER = "largest-tier"
    END_TO_END = "end-to-end"


class Budget(enum.Enum):
    """Whether all GPUs are given to tiers (the paper's section 3.2), or only as many as help the slowest (appendix D)."""

    AT_MOST = "at-most"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a cascade is to run. models: by tier, in the cascade's order. judge_s: to judge one answer.

    measured: by tier, replicas whose step times were measured; a tier that has some uses only those, else a roofline.
    """

    cluster: ClusterSpec
    tiers: tuple[str, ...]
    models: tuple[ModelSpec, ...]
    runtime: Runtime = field(default_factory=Runtime)
    limits: EngineLimits = field(default_factory=EngineLimits)
    judge_s: float = 0.0
    measured: tuple[tuple[Replica, ...], ...] = ()

    def replica(self, tier: int, shape: ReplicaShape, longest_tokens: int) -> tuple[Replica | None, str]:
        """(a replica of tier `tier` with room for such a request in each lane, or None; why not)."""
        if self.measured and self.measured[tier]:
            found = next((r for r in self.measured[tier] if r.shape == shape), None)
            if found is None:
                return None, f"{self.tiers[tier]} has no profile for {shape}"
            room = found.lane_tokens
            if room < longest_tokens:
                return (
                    None,
                    f"{self.tiers[tier]} was measured with KV for {room} tokens, a request has {longest_tokens}",
                )
            return found, ""
        model = self.models[tier]
        fits = fit(model, shape, self.cluster, self.runtime, longest_tokens * shape.pp)
        if not fits.ok:
            return None, fits.reason
        return Replica(shape, roofline(model, shape, self.cluster, self.runtime), fits.kv_tokens, self.limits), ""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What the cascade is to serve.

    judged: the whole judged sample, which decides about quality. requests: those that arrive, drawn from it, in order of
    arrival; arrival_s (N).
    """

    judged: JudgedSample
    requests: JudgedSample
    arrival_s: Floats


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """One tier of a plan. gpus: given to it. strategy: with the latency it was chosen for.

    report: its requests as the cascade runs.
    """

    name: str
    model: str
    gpus: int
    strategy: Strategy
    share_processed: float
    share_answered: float
    report: Report


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """latency_p95_s: the largest tier's (the paper's L). end_to_end_p95_s: what a user feels, over the tiers visited and
    judging, each tier's requests arriving when the tier below has given them up. load: None where arrivals have no rate."""

    tiers: tuple[TierOutcome, ...]
    thresholds: tuple[float, ...]
    quality: float
    latency_p95_s: float
    end_to_end_p95_s: float
    solution: Solution
    dispatch: Dispatch
    binds: str
    simulations: int
    gpu_step: int
    infeasible: dict[str, str] = field(default_factory=dict)
    promise: Promise | None = None
    objective: Objective = Objective.LARGEST_TIER
    budget: Budget = Budget.AT_MOST
    load: SustainedLoad | None = None


def replica_kinds(site: Site, tier: int, gpus: int, longest_tokens: int) -> tuple[list[Replica], str]:
    """(the replicas that a tier can have on so many GPUs, why the last shape that failed did not fit)."""
    found, reason = [], ""
    tp = 1
    while tp <= site.cluster.gpus_per_node:
        for pp in PIPELINES:
            shape = ReplicaShape(tp, pp)
            if shape.gpus > gpus:
                continue
            replica, why = site.replica(tier, shape, longest_tokens)
            if replica is not None:
                found.append(replica)
            reason = why or reason
        tp *= 2
    return found, reason


def plan_cascade(
    site: Site,
    demand: Demand,
    *,
    gpus: int | None = None,
    min_quality: float | None = None,
    max_latency_s: float | None = None,
    objective: Objective = Objective.LARGEST_TIER,
    confidence: float | None = None,
    seed: int = 0,
    dispatch: Dispatch = Dispatch.CAPACITY,
    budget: Budget = Budget.AT_MOST,
    on_evaluation: Callable[[int], None] = lambda _: None,
) -> CascadePlan:
    """The plan with the least latency at a quality, or the most quality within a latency.

    gpus: at most so many of the cluster's; None for all.
    objective: of which latency; END_TO_END goes with min_quality, without a confidence, for up to three tiers.
    confidence: min_quality holds for new requests with this probability, see routing.confidence; None for the sample's mean.
    seed: of the split that a confidence needs.
    budget: EXACT gives every GPU to a tier, which the MILP decides; it goes with LARGEST_TIER.

    Raises:
        InvalidRequest: not just one target, one that is no score or no time, more GPUs than there are, or fewer than
            LEAST_REQUESTS requests.
        Unreachable: no plan meets the target, or no tier that is needed fits.
    """
    if (min_quality is None) == (max_latency_s is None):
        raise invalid("target", "give either min_quality or max_latency_s")
    if min_quality is not None and not 0 <= min_quality <= 100:
        raise invalid("min_quality", f"must be from 0 to 100, not {min_quality:g}")
    if max_latency_s is not None and not 0 < max_latency_s < np.inf:
        raise invalid("max_latency_s", f"must be a number of seconds over 0, not {max_latency_s:g}")
    if len(demand.arrival_s) < LEAST_REQUESTS:
        raise invalid("requests", f"must be at least {LEAST_REQUESTS} to plan on, not {len(demand.arrival_s)}")
    deployer, reasons = deployer_for(site, demand, gpus=gpus, dispatch=dispatch, on_evaluation=on_evaluation)
    if objective is Objective.END_TO_END and (min_quality is None or confidence is not None or len(site.tiers) > 3):
        raise invalid("objective", "end-to-end goes with min_quality, without a confidence, for up to three tiers")
    if budget is Budget.EXACT and objective is Objective.END_TO_END:
        raise invalid("budget", "exact goes with the largest tier's latency as objective")
    try:
        promise = None
        if confidence is not None:
            if min_quality is None:
                raise invalid("confidence", "is about min_quality, which is not given")
            promise = promised(
                demand.judged, min_quality, confidence, seed, lambda q, on: least_latency(deployer, q, on)
            )
            solution = promise.solution
        elif min_quality is not None:
            solution = least_latency(deployer, min_quality, demand.judged)
            if objective is Objective.END_TO_END:
                solution = least_end_to_end(
                    deployer,
                    demand.judged,
                    min_quality,
                    solution,
                    lambda h, s: float(np.percentile(simulate_cascade(site, demand, h, s, dispatch)[1], 95)),
                    site.judge_s,
                )
        else:
            assert max_latency_s is not None
            solution = most_quality(deployer, max_latency_s, demand.judged)
    except Unreachable as error:
        if reasons:
            raise Unreachable(f"{error} ({'; '.join(reasons.values())})", error.best) from None
        raise
    if budget is Budget.EXACT and (whole := deployer.spread(solution.thresholds)) is not None:
        solution = dataclasses.replace(solution, deployment=whole)
    made = outcome(site, demand, solution, deployer, reasons, promise)
    return dataclasses.replace(made, objective=objective, budget=budget)


def deployer_for(
    site: Site,
    demand: Demand,
    *,
    gpus: int | None,
    dispatch: Dispatch,
    on_evaluation: Callable[[int], None] = lambda _: None,
) -> tuple[Deployer, dict[str, str]]:
    """(the deployment solver, tiers that fit nowhere with the reason)."""
    gpus = site.cluster.gpus if gpus is None else gpus
    if not 1 <= gpus <= site.cluster.gpus:
        raise invalid("gpus", f"the cluster has {site.cluster.gpus}, not {gpus}")
    if demand.judged.tiers != site.tiers:
        raise invalid("quality", f"judged are the tiers {', '.join(demand.judged.tiers)}, not {', '.join(site.tiers)}")
    kinds, reasons = [], {}
    for tier, name in enumerate(site.tiers):
        longest = int((demand.requests.input_tokens + demand.requests.output_tokens[:, tier]).max())
        able, reason = replica_kinds(site, tier, gpus, longest)
        kinds.append(able)
        if not able:
            reasons[name] = reason
    return Deployer(
        demand.requests, demand.arrival_s, kinds, gpus, dispatch=dispatch, on_evaluation=on_evaluation
    ), reasons


def outcome(
    site: Site,
    demand: Demand,
    solution: Solution,
    deployer: Deployer,
    reasons: dict[str, str],
    promise: Promise | None = None,
) -> CascadePlan:
    """The plan that a solution amounts to, simulated from end to end."""
    strategies = solution.deployment.strategies
    reports, total_s = simulate_cascade(site, demand, solution.thresholds, strategies, deployer.dispatch)
    processed = route(demand.judged, solution.thresholds)
    tiers = tuple(
        TierOutcome(name, model.name, given, strategy, reaching, answering, found)
        for name, model, given, strategy, reaching, answering, found in zip(
            site.tiers,
            site.models,
            solution.deployment.gpus,
            strategies,
            processed.share_processed(),
            processed.share_answered(),
            reports,
            strict=True,
        )
    )
    slowest = max(range(len(tiers)), key=lambda i: strategies[i].latency_s)
    binds = (
        f"{tiers[slowest].name} is the slowest tier; {sum(s.gpus for s in strategies)} of {deployer.gpus} GPUs are used"
    )
    load = sustained_load(demand.requests, demand.arrival_s, solution.thresholds, strategies)
    return CascadePlan(
        tiers,
        solution.thresholds,
        processed.quality,
        solution.deployment.latency_s,
        float(np.percentile(total_s, 95)),
        solution,
        deployer.dispatch,
        f"{binds}; {load}" if load is not None and load.overloaded else binds,
        deployer.simulations,
        deployer.gpu_step,
        reasons,
        promise,
        load=load,
    )


def simulate_cascade(
    site: Site, demand: Demand, thresholds: Sequence[float], strategies: Sequence[Strategy], dispatch: Dispatch
) -> tuple[list[Report], Floats]:
    """(each tier's report, (N) seconds from a request's arrival to its final answer): tier by tier, in virtual time.

    InvalidRequest where requests reach a tier that has no GPUs.
    """
    requests = demand.requests
    processed = route(requests, thresholds).processed
    at = demand.arrival_s.copy()  # when each request reaches the tier at hand
    done = np.zeros(len(requests))
    reports = []
    for tier, strategy in enumerate(strategies):
        chosen = np.flatnonzero(processed[tier])
        order = chosen[np.argsort(at[chosen], kind="stable")]
        work = Workload(at[order], requests.input_tokens[order], requests.output_tokens[order, tier])
        replicas = [replica for replica, count in strategy.replicas for _ in range(count)]
        if len(work) and not replicas:
            raise invalid("thresholds", f"{len(work)} requests reach tier {site.tiers[tier]}, which has no GPUs")
        served = serve(work, replicas, dispatch)
        judged_s = site.judge_s if tier < len(strategies) - 1 else 0.0
        at[order] = done[order] = served.finish_s + judged_s
        reports.append(report(work, served))
    return reports, done - demand.arrival_s


def frontier(site: Site, demand: Demand, plan: CascadePlan, gpus: int | None, points: int) -> list[tuple[float, float]]:
    """(quality, latency_p95_s) of the best plans for `points` targets between the first and the last tier's quality."""
    worst, best = demand.judged.worst, demand.judged.best
    found = {(plan.quality, plan.latency_p95_s)}
    deployer, _ = deployer_for(site, demand, gpus=gpus, dispatch=plan.dispatch)
    for target in np.linspace(worst, best, points):
        try:
            solution = least_latency(deployer, float(target), demand.judged)
        except Unreachable:
            continue
        found.add((solution.quality, solution.deployment.latency_s))
    # what is beaten in both is no best plan
    return sorted(p for p in found if not any(q[0] >= p[0] and q[1] <= p[1] and q != p for q in found))


def mesh_tiers(thresholds: Sequence[float | None], instances: Sequence[int]) -> list[tuple[float | None, int]]:
    """(threshold, instances) of each tier, as a plan of the mesh says them. thresholds: None or over 100 passes a tier over.

    A tier without instances is skipped there; what still reaches one that is on its way out stands at a full score only. The
    last tier with instances accepts everything: a request that no sampled one was like must not escalate to where nobody is.
    """
    said = [100.0 if h is None or h > 100 or not count else h for h, count in zip(thresholds, instances, strict=False)]
    last = max((i for i, count in enumerate(instances) if count), default=len(said))
    if last < len(said):
        said[last] = 0.0
    return list(zip([*said, None], instances, strict=True))


def draw_demand(judged: JudgedSample, arrival_s: Floats, seed: int) -> Demand:
    """Prompts for the arrivals, drawn from the judged sample: each once before any comes again."""
    rng = np.random.default_rng(seed)
    rounds = -(-len(arrival_s) // len(judged))
    rows = np.concatenate([rng.permutation(len(judged)) for _ in range(rounds)])[: len(arrival_s)]
    return Demand(judged, judged.subset(rows), arrival_s)
