"""Planning again keeps the length stages of a tier, or the plan says that they went."""

from dataclasses import replace

import pytest

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.replan_job import ReplanJob
from planner_service.replanner import _follow_up
from planner_service.rescheduling import Drift, Shift
from services.domain import Plan, TierPlan
from services.domain.bursts import BurstLadder, BurstStep, BurstThreshold
from services.domain.stages import QoeModel, Stage

QOE = QoeModel(0.005, 1e-5, 1e-8, 0.0, 2e-7)
STAGES = (Stage(0, 300, 2), Stage(300, 2000, 1))
DRIFT = Drift((Shift("requests per second", 1.0, 9.0),), ())
JOB = ReplanJob("c", "m", "t", "q", 80.0, None, None, 100, 1, 9.0, ())


@pytest.mark.parametrize(
    ("instances", "counts"), [(3, (2, 1)), (5, (4, 1)), (2, (1, 1)), (1, ())], ids=["same", "more", "fewer", "too few"]
)
def test_stages_survive_planning_again_or_the_note_says_that_they_went(instances: int, counts: tuple[int, ...]) -> None:
    before = Plan(1, (TierPlan("small", "s", 70.0, 3, STAGES, QOE), TierPlan("large", "l", None, 1)))
    found = pb.CascadePlan(
        tiers=[
            pb.PlannedTier(name="small", threshold=60.0, replicas=[pb.ReplicaGroup(tp=1, pp=1, count=instances)]),
            pb.PlannedTier(name="large", replicas=[pb.ReplicaGroup(tp=1, pp=1, count=1)]),
        ]
    )
    plan = _follow_up(before, found, DRIFT, JOB)
    rungs = ((70.0, 90.0, 1.0), (0.0, 80.0, 2.0))
    rules = tuple(BurstStep((BurstThreshold(h),), quality, rate, "large", 0.5) for h, quality, rate in rungs)
    with_ladder = replace(before, burst=BurstLadder(85.0, rules))
    with_ladder.validate()
    without = _follow_up(with_ladder, found, DRIFT, JOB)
    assert (without.tiers, without.burst) == (plan.tiers, None)
    assert without.provenance.note.endswith("the burst ladder was for other thresholds: it is removed")
    small, large = plan.tiers
    assert (small.threshold, small.instances, large.stages) == (60.0, instances, ())
    assert tuple(stage.instances for stage in small.stages) == counts
    assert small.qoe == QOE
    plan.validate()
    if counts:
        assert tuple(stage.from_tokens for stage in small.stages) == (0, 300)
    assert ("small has fewer instances than length stages" in plan.provenance.note) == (not counts)
