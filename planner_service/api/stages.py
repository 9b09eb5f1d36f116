"""Length stages of a tier: by the partition, and with a trace by replay."""

import dataclasses
import time
from dataclasses import dataclass

from penstock.planner_service.files.profiles import fit_qoe
from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.simulator.cluster import Moves
from penstock.planner_service.stages.choice import choose
from penstock.planner_service.stages.partition import StagePlan, plan_stages, with_layout
from penstock.planner_service.stages.profile import batches_of
from penstock.planner_service.stages.replay import ReplayVerdict
from penstock.planner_service.stages.sample import LengthSample, count_in_flight, in_flight
from penstock.services.domain.errors import invalid
from penstock.services.domain.stages.layout import StageLayout
from penstock.types.plans import QoeModel


@dataclass(frozen=True, slots=True)
class Stages:
    """plan: the layout. sample: the sequences that it was made for. verdict: of the replay; None without one."""

    plan: StagePlan
    qoe: QoeModel
    sample: LengthSample
    verdict: ReplayVerdict | None
    took_s: float


def at_rate(work: Workload, rate: float | None) -> Workload:
    """The trace with so many arrivals per second; None leaves it. InvalidRequest where it has no rate."""
    if rate is None:
        return work
    if not 0 < work.rate_per_s < float("inf"):
        raise invalid("rate", "the trace has only one arrival time and cannot be scaled to a rate")
    return dataclasses.replace(work, arrival_s=work.arrival_s * work.rate_per_s / rate)


def staged(
    instances: int,
    max_tokens: int,
    moves: Moves,
    *,
    qoe: QoeModel | None = None,
    sample: LengthSample | None = None,
    trace: tuple[Workload, Replica] | None = None,
    replayed: bool = True,
    against: StageLayout | None = None,
) -> Stages:
    """The stages of so many instances, up to max_tokens.

    trace: requests, and the replica that serves them; its last ones are replayed, unless `replayed` is false. qoe, sample:
    needed without a trace; else fitted to its batches, and what it has in flight. against: the layout that a change has to
    pay against; None for one stage.

    Raises:
        InvalidRequest: Something is out of bounds; names it.
    """
    began = time.monotonic()
    if qoe is None:
        if trace is None:
            raise invalid("qoe", "missing, and there is no trace to fit it to")
        qoe = fit_qoe(batches_of(trace[1], trace[0]))
    if sample is None:
        if trace is None:
            raise invalid("sequences", "missing, and there is no trace that has them")
        sample = in_flight(trace[0], count_in_flight(trace[0], qoe, instances, trace[1]))
    plan = plan_stages(sample, qoe, instances, max_tokens, moves)
    verdict, took_s = None, time.monotonic() - began
    if trace is not None and replayed:
        verdict = choose(*trace, moves, qoe, instances, max_tokens, against)
        plan = with_layout(plan, verdict.chosen, sample, qoe, moves)
    return Stages(plan, qoe, sample, verdict, took_s)
