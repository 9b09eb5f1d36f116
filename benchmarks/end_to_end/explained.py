"""Why requests took longer than forecast: a run simulated again with what is known after it. No I/O.

Three causes are told apart, one added to the other:
- `forecast`: lengths drawn from the judged prompts, routes from their scores, step times of the profiles.
- `hindsight`: the lengths and routes of the run itself.
- `slower_steps`: also the step times that the run had. Their ratio to those of the profile is not fitted to latencies: with
  it, the simulated engines are busy for as long as the threads of the real engines ran or waited for a core.

What is left between `slower_steps` and the measurement is the router, the client, messages, and how requests are dispatched.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.end_to_end.systems import System, replicas
from penstock.cli.replay import Run
from planner_service.simulator import Workload, serve
from planner_service.simulator.workload import Floats, Ints
from planner_service.site import Site
from services.domain.latency import StepLatencyModel

MOST_FACTOR, FACTOR_TOLERANCE = 8.0, 0.01  # of step times


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Of the engines' threads of all workers during a run: seconds on a core, and seconds ready to run without one."""

    ran_s: float
    waited_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """The N answered requests of a run on C tiers. arrival_s (N), ascending.

    input_tokens (N, C): without those in a prefix cache. output_tokens (N, C): 0 where the tier did not have the request.
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """felt_s (N): from arrival to answer. busy_s: of all engines."""

    felt_s: Floats
    busy_s: float


@dataclass(frozen=True, slots=True)
class Explained:
    """step_factor: step times of the run over those of the profiles. waiting_share: of the engines' time, without a core.

    The others are seconds from arrival to answer. outside_tiers_s: mean of the client's latency less the time at tiers.
    """

    step_factor: float
    waiting_share: float
    hindsight_p50_s: float
    hindsight_p95_s: float
    slower_steps_p50_s: float
    slower_steps_p95_s: float
    outside_tiers_s: float


def requests_of(run: Run, arrival_s: Sequence[float], tiers: Sequence[str]) -> Requests:
    """The answered requests of a run. arrival_s: of all, in the order of `run.outcomes`."""
    chosen = [i for i, outcome in enumerate(run.outcomes) if outcome.reply is not None]
    inputs, outputs = np.zeros((2, len(chosen), len(tiers)), np.int64)
    for row, (_, reply) in enumerate(run.answered):
        for work in reply.tiers:
            if work.instance_id:  # else passed over
                tier = tiers.index(work.tier)
                inputs[row, tier] = max(1, work.usage.prompt_tokens - work.usage.cached_prompt_tokens)
                outputs[row, tier] = max(1, work.usage.output_tokens)
    return Requests(np.asarray(arrival_s, np.float64)[chosen], inputs, outputs)


def simulated(site: Site, requests: Requests, system: System) -> Simulated:
    """Serve the requests on the system's workers."""
    at_s, busy_s = requests.arrival_s.copy(), 0.0
    done_s = at_s.copy()
    for tier, (replica, count) in enumerate(zip(replicas(site), system.workers, strict=True)):
        rows = np.flatnonzero(requests.output_tokens[:, tier])
        rows = rows[np.argsort(at_s[rows], kind="stable")]
        if not len(rows):
            continue
        work = Workload(at_s[rows], requests.input_tokens[rows, tier], requests.output_tokens[rows, tier])
        served = serve(work, [replica] * count)
        busy_s += served.busy_share * count * float(served.finish_s.max() - work.arrival_s[0])
        done_s[rows] = served.finish_s
        judged = system.shares is None and tier < len(site.tiers) - 1
        at_s[rows] = done_s[rows] = served.finish_s + (site.judge_s if judged else 0.0)
    return Simulated(done_s - requests.arrival_s, busy_s)


def step_factor(site: Site, requests: Requests, system: System, busy_s: float) -> float:
    """By what the profiles' step times are multiplied so that the simulated engines are busy for `busy_s`.

    Between 1 / MOST_FACTOR and MOST_FACTOR: slower steps are shared by more requests, but busy time never falls.
    """
    low, high = 1 / MOST_FACTOR, MOST_FACTOR
    while high / low > 1 + FACTOR_TOLERANCE:
        middle = math.sqrt(low * high)
        if simulated(slower(site, middle), requests, system).busy_s < busy_s:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def explained(site: Site, run: Run, arrival_s: Sequence[float], system: System, engine: EngineTime) -> Explained | None:
    """None if nothing was answered."""
    if not run.answered:
        return None
    requests = requests_of(run, arrival_s, site.tiers)
    factor = step_factor(site, requests, system, engine.ran_s + engine.waited_s)
    hindsight_s = simulated(site, requests, system).felt_s
    slower_steps_s = simulated(slower(site, factor), requests, system).felt_s
    outside = [outcome.latency_s - sum(tier.time_s for tier in reply.tiers) for outcome, reply in run.answered]
    return Explained(
        factor,
        engine.waited_s / (engine.ran_s + engine.waited_s),
        float(np.percentile(hindsight_s, 50)),
        float(np.percentile(hindsight_s, 95)),
        float(np.percentile(slower_steps_s, 50)),
        float(np.percentile(slower_steps_s, 95)),
        float(np.mean(outside)),
    )


def slower(site: Site, factor: float) -> Site:
    """A site whose measured steps take `factor` times as long."""
    measured = tuple(tuple(replace(one, latency=_times(one.latency, factor)) for one in tier) for tier in site.measured)
    return replace(site, measured=measured)


def _times(model: StepLatencyModel, factor: float) -> StepLatencyModel:
    return StepLatencyModel(
        model.knot_tokens,
        tuple(factor * knot_s for knot_s in model.knot_s),
        factor * model.context_token_s,
        factor * model.pair_s,
        factor * model.gap_s,
        factor * model.draft_step_s,
    )
