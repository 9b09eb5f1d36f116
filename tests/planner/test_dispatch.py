"""Dispatch by pending work: routers and the simulator choose alike, because they call the same functions."""

from collections.abc import Sequence
from random import Random

import numpy as np

from penstock.planner_service.simulator import EngineLimits, Replica, Workload
from penstock.planner_service.simulator.cluster import Cluster, Moves
from penstock.planner_service.simulator.policies import Dispatch
from penstock.router_service.routing.placement import Placed, PlacementCandidate, place
from penstock.services.domain.dispatch import NOTHING_SENT, SPILL_S, Sent, saved_tokens, stage_for, wait_s
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.mesh_status import StagePlace

CARD = ModelCard("only", "m", "d", "sim", 10_000, 1000, 16, 1000)
REPLICA = Replica(ReplicaShape(1, 1), StepLatencyModel.linear(0.005, 1e-4, 1e-8), 60_000, EngineLimits(64, 256, 16))
BOUNDARIES = (300, 1000, 10_000)


def test_a_request_is_passed_on_for_a_much_shorter_wait_alone() -> None:
    assert stage_for([0.0]) == 0
    assert stage_for([SPILL_S, 0.0]) == 0
    assert stage_for([SPILL_S + 0.01, 0.0]) == 1
    assert stage_for([9.0, 9.0, 0.0]) == 0, "one stage after the other"
    assert stage_for([9.0, 5.0, 0.0]) == 2
    assert wait_s(1000, 500.0) == 2.0
    assert wait_s(1000, 0.0) == 0.0, "unknown"
    assert saved_tokens(10) == saved_tokens(0) > 10
    assert saved_tokens(10_000) == 5000


def chosen_by_router(
    pending: Sequence[int],
    contexts: Sequence[int],
    sent: Sequence[Sent],
    stages: Sequence[int],
    tokens: int,
    rate: float,
) -> str:
    records = [
        InstanceRecord(
            f"{i:02}",
            Role.WORKER,
            "h:1",
            1.0,
            1,
            3.0,
            model=CARD,
            load=Load((context,), (), 9, 1.0, pending_tokens=prompt, prompt_tokens_per_s=rate),
            place=StagePlace(stage, 0, BOUNDARIES[stage]),
        )
        for i, (prompt, context, stage) in enumerate(zip(pending, contexts, stages, strict=True))
    ]
    candidates = [*map(PlacementCandidate.of, records)]
    in_flight = {f"{i:02}": one for i, one in enumerate(sent) if one != NOTHING_SENT}
    found = place(candidates, request_id="r", tokens=tokens, in_flight=in_flight, full=set(), ejected=set())
    assert isinstance(found, Placed)
    return found.record.instance_id


def test_the_simulator_places_as_a_router_does() -> None:
    """On 300 random states of staged tiers, with what was published and what was sent since."""
    rng = Random(3)
    for case in range(300):
        count = rng.randint(3, 8)
        stages = sorted([0, 1, 2, *(rng.randrange(3) for _ in range(count - 3))])
        pending = [rng.randrange(1, 9000) for _ in range(count)]
        contexts = [max(2000, prompt) + rng.randrange(1000) for prompt in pending]
        tokens = rng.choice([50, 500, 5000])
        cluster = Cluster(
            Workload(np.zeros(1), np.array([tokens]), np.array([2])), [REPLICA] * count, Moves(1.0, 1.0, 0.0)
        )
        dispatch = Dispatch(cluster)
        dispatch._work = [
            type(dispatch._work[0])(prompt, 1, context) for prompt, context in zip(pending, contexts, strict=True)
        ]
        dispatch._sent = [rng.choice([NOTHING_SENT, Sent(1, 700)]) for _ in range(count)]
        groups = [[i for i in range(count) if stages[i] == s] for s in range(3) if tokens < BOUNDARIES[s]]
        rate = dispatch._prompt_tokens_per_s
        by_router = chosen_by_router(pending, contexts, dispatch._sent, stages, tokens, rate)
        assert f"{dispatch.place(0, groups):02}" == by_router, case
