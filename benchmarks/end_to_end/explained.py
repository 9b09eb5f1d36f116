"""Why requests took longer than forecast: a run simulated again with what is known after it. No I/O.

Three causes are told apart, one added to the other:
- `forecast`: lengths drawn from the judged prompts, routes from their scores, step times of the profiles.
- `hindsight`: the lengths and routes of the run itself.
- `slower_steps`: also the step times that the run had. Their ratio to those of the profile is not fitted to latencies: with
  it, the simulated engines of a tier are busy for as long as the threads of the real ones ran or waited for a core.

What is left between `slower_steps` and the measurement is judging, the router, messages, the client, and how requests are
dispatched.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.end_to_end.systems import System, replicas
from penstock.cli.replay import Run
from penstock.planner_service.question.site import Site
from penstock.planner_service.simulator import Workload, serve
from penstock.planner_service.simulator.workload import Floats, Ints

MOST_FACTOR, FACTOR_TOLERANCE = 8.0, 0.01  # of step times


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Of the engines' threads of a tier during a run: seconds on a core, and seconds ready to run without one."""

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
    """felt_s (N): from arrival to answer. busy_s: of all engines of each tier."""

    felt_s: Floats
    busy_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Explained:
    """step_factors: step times of the run over those of the profiles. waiting_shares: of the engines' time, without a core.
    Both by tier; None where it had no requests.

    The others are seconds from arrival to answer. outside_tiers_s: mean of the client's latency less the time at tiers.
    """

    step_factors: tuple[float | None, ...]
    waiting_shares: tuple[float | None, ...]
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
    at_s, busy_s = requests.arrival_s.copy(), [0.0] * len(site.tiers)
    done_s = at_s.copy()
    for tier, (replica, count) in enumerate(zip(replicas(site), system.workers, strict=True)):
        rows = np.flatnonzero(requests.output_tokens[:, tier])
        rows = rows[np.argsort(at_s[rows], kind="stable")]
        if not len(rows):
            continue
        work = Workload(at_s[rows], requests.input_tokens[rows, tier], requests.output_tokens[rows, tier])
        served = serve(work, [replica] * count)
        busy_s[tier] = served.busy_share * count * float(served.finish_s.max() - work.arrival_s[0])
        done_s[rows] = served.finish_s
        judged = system.shares is None and tier < len(site.tiers) - 1
        at_s[rows] = done_s[rows] = served.finish_s + (site.judge_s if judged else 0.0)
    return Simulated(done_s - requests.arrival_s, tuple(busy_s))


def step_factors(
    site: Site, requests: Requests, system: System, engines: Mapping[str, EngineTime]
) -> tuple[float | None, ...]:
    """By what the profiles' step times are multiplied so that the simulated engines are busy as long as the real ones.

    By tier; None without requests or engine time. Between 1 / MOST_FACTOR and MOST_FACTOR: slower steps are shared by more
    requests, but busy time never falls.
    """
    factors: list[float | None] = [None] * len(site.tiers)
    for tier, name in enumerate(site.tiers):
        if name not in engines or not requests.output_tokens[:, tier].any():
            continue
        busy_s, low, high = engines[name].ran_s + engines[name].waited_s, 1 / MOST_FACTOR, MOST_FACTOR
        while high / low > 1 + FACTOR_TOLERANCE:
            factors[tier] = middle = math.sqrt(low * high)
            if simulated(slower(site, factors), requests, system).busy_s[tier] < busy_s:
                low = middle
            else:
                high = middle
        factors[tier] = math.sqrt(low * high)  # decides when requests reach the next tier
    return tuple(factors)


def explained(
    site: Site, run: Run, arrival_s: Sequence[float], system: System, engines: Mapping[str, EngineTime]
) -> Explained | None:
    """None if nothing was answered. engines: by tier."""
    if not run.answered:
        return None
    requests = requests_of(run, arrival_s, site.tiers)
    factors = step_factors(site, requests, system, engines)
    hindsight_s = simulated(site, requests, system).felt_s
    slower_steps_s = simulated(slower(site, factors), requests, system).felt_s
    outside = [outcome.latency_s - sum(tier.time_s for tier in reply.tiers) for outcome, reply in run.answered]
    waiting = [
        None if factor is None else engines[name].waited_s / (engines[name].ran_s + engines[name].waited_s)
        for name, factor in zip(site.tiers, factors, strict=True)
    ]
    return Explained(
        factors,
        tuple(waiting),
        float(np.percentile(hindsight_s, 50)),
        float(np.percentile(hindsight_s, 95)),
        float(np.percentile(slower_steps_s, 50)),
        float(np.percentile(slower_steps_s, 95)),
        float(np.mean(outside)),
    )


def slower(site: Site, factors: Sequence[float | None]) -> Site:
    """A site whose measured steps take `factors` times as long, by tier; None leaves a tier as it is."""
    measured = tuple(
        tuple(replace(one, latency=one.latency.scaled(factor or 1.0)) for one in tier)
        for tier, factor in zip(site.measured, factors, strict=True)
    )
    return replace(site, measured=measured)
