"""The choice of a tier's length stages: propose, replay, decide. No I/O.

`penstock stages`, `PlanStages` and planning again all choose here.
"""

import numpy as np

from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.simulator.cluster import Moves
from penstock.planner_service.stages.proposals import propose
from penstock.planner_service.stages.replay import REPLAYED, ReplayVerdict, count_replayed, judge, last_requests
from penstock.planner_service.stages.sample import in_flight
from penstock.services.domain.errors import check, invalid
from penstock.services.domain.stages.layout import StageLayout
from penstock.types.plans import QoeModel
from penstock.types.problems import FieldProblem

MAX_REQUESTS = 200_000
"""Requests of a trace that is sent to be replayed: all are read, though only the last ones are replayed."""
MAX_INSTANCES = 256
"""Instances of a replay that is asked for by a call. Every request is a row of every instance: 0.2 GB at 24,000 requests."""
MAX_SPAN_S = 24 * 3600.0
"""From the first replayed arrival to the last: every 50 ms of it is simulated."""
MAX_REPLAYED_TOKENS = 300_000_000
"""Input and output tokens of the replayed requests: 3,000 times 100,000."""
MAX_KV_TOKENS = 1_000_000_000
"""Of one instance."""


def choose(
    work: Workload,
    replica: Replica,
    moves: Moves,
    qoe: QoeModel,
    instances: int,
    max_tokens: int,
    against: StageLayout | None = None,
) -> ReplayVerdict:
    """Propose layouts by the partition, replay the best few on the trace's last requests, and judge them. Deterministic.

    max_tokens: end of the last stage. against: the layout that serves; then one stage is among the proposals, and a change
    has to pay against what serves. None: a layout has to pay against one stage.

    Raises:
        InvalidRequest: arrivals without a rate, no instance, a request longer than max_tokens or than an instance's KV, or a
            layout `against` of another number of instances.
    """
    if against is not None and len(against.stages) == 1:
        against = None
    for part, which in ((work, ""), (last_requests(work), f" of the last {REPLAYED}")):
        if not 0 < part.rate_per_s < np.inf:
            raise invalid("trace.arrival_s", f"have no rate: at least two times{which} are needed")
    held = in_flight(work, count_replayed(work, replica, moves, instances))
    layouts = propose(work, held, qoe, replica, instances, max_tokens, moves)
    if against is not None:
        others = [layout for layout in layouts if layout.stages != against.stages]
        layouts = [StageLayout.single(instances, max_tokens), *others]
    return judge(work, replica, moves, qoe, instances, layouts, against)


def check_bounds(work: Workload, replica: Replica, instances: int, max_tokens: int) -> None:
    """Refuse a replay that would take too long or too much memory, before it begins.

    Raises:
        InvalidRequest: fields of a PlanStagesRequest are out of bounds; the error names every one.
    """
    last = work.subset(np.arange(max(0, len(work) - 2 * REPLAYED), len(work)))  # with those before: `requests_before`
    span_s = float(last.arrival_s[-1] - last.arrival_s[0])
    tokens = int((last.input_tokens + last.output_tokens).sum())
    checks = (
        (len(work) > MAX_REQUESTS, "trace.arrival_s", f"at most {MAX_REQUESTS} requests, not {len(work)}"),
        (
            span_s > MAX_SPAN_S,
            "trace.arrival_s",
            f"the last {len(last)} arrivals, which are replayed, take {span_s:.6g} s: at most {MAX_SPAN_S:g} s",
        ),
        (
            tokens > MAX_REPLAYED_TOKENS,
            "trace",
            f"the last {len(last)} requests, which are replayed, have {tokens} tokens: at most {MAX_REPLAYED_TOKENS}",
        ),
        (
            work.longest_tokens >= max_tokens,
            "max_tokens",
            f"must exceed the trace's longest request, {work.longest_tokens} tokens, not {max_tokens}",
        ),
        (
            not 1 <= instances <= MAX_INSTANCES,
            "instance_count",
            f"must be from 1 to {MAX_INSTANCES} for a replay, not {instances}",
        ),
        (
            not (work.longest_tokens <= replica.request_tokens and replica.lane_tokens <= MAX_KV_TOKENS),
            "replica.kv_tokens",
            f"must be from {work.longest_tokens}, the trace's longest request, to {MAX_KV_TOKENS} per lane in whole blocks, "
            f"not {replica.lane_tokens}",
        ),
        (not 0 < max(replica.latency.knot_s) < np.inf, "replica.knot_s", "a step must take time"),
    )
    check(FieldProblem(name, problem) for wrong, name, problem in checks if wrong)
