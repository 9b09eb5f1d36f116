"""Planning again keeps the length stages of a tier unless a replay favours others, or the plan says that they went."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.mapper import from_message, to_message
from penstock.planner_service.files.measured import measured_of, workload_of
from penstock.planner_service.live import solver
from penstock.planner_service.live.plan_publisher import PlanPublisher
from penstock.planner_service.live.replan_job import ReplanJob
from penstock.planner_service.live.replanner import Replanner, _follow_up, replan_job
from penstock.planner_service.live.rescheduling import Drift, Shift
from penstock.planner_service.live.solver_pool import SolverPool
from penstock.planner_service.live.worker_shapes import WorkerShapes
from penstock.planner_service.simulator import EngineLimits, Replica
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.services.clock import SystemClock
from penstock.services.domain.errors import RevisionConflict
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.plans import check_plan
from penstock.services.domain.workload import RequestRecord, TierVisit, Window
from penstock.services.mesh_file import load_mesh_file
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.state.workload import WorkloadStore
from penstock.types.deployments import ReplicaGroup
from penstock.types.planned import CascadePlan, PlanEvent, PlannedTier
from penstock.types.planning import Trace
from penstock.types.plans import Plan, QoeModel, Stage, TierPlan
from penstock.types.rules import AcceptanceRules, LongAnswers
from tests.conftest import write_mesh_file
from tests.support.questions import replan_question

QOE = QoeModel(0.005, 1e-5, 1e-8, 0.0, 2e-7)
STAGES = (Stage(0, 300, 2), Stage(300, 2000, 1))
DRIFT = Drift((Shift("requests per second", 1.0, 9.0),), ())


@pytest.mark.parametrize(
    ("instances", "counts"), [(3, (2, 1)), (5, (4, 1)), (2, (1, 1)), (1, ())], ids=["same", "more", "fewer", "too few"]
)
def test_stages_survive_planning_again_or_the_note_says_that_they_went(instances: int, counts: tuple[int, ...]) -> None:
    before = Plan(1, (TierPlan("small", "s", 70.0, 3, STAGES, QOE), TierPlan("large", "l", None, 1)))
    small_tier = PlannedTier("small", "s", instances, (ReplicaGroup(1, 1, instances),), 60.0)
    found = CascadePlan((small_tier, PlannedTier("large", "l", 1, (ReplicaGroup(1, 1, 1),))), 80.0, 1.0, 1.0)
    plan = _follow_up(before, found, DRIFT)
    assert _follow_up(dataclasses.replace(before, best_answer=True), found, DRIFT).best_answer
    small, large = plan.tiers
    assert (small.threshold, small.instances, large.stages) == (60.0, instances, ())
    assert tuple(stage.instances for stage in small.stages) == counts
    assert small.qoe == QOE
    check_plan(plan)
    if counts:
        assert tuple(stage.from_tokens for stage in small.stages) == (0, 300)
    assert ("small has fewer instances than length stages" in plan.note) == (not counts)


def test_after_the_plan_a_solver_tells_what_reaches_each_staged_tier(tmp_path: Path) -> None:
    """The requests that escalate, at the rate at which they do, and the replica that the plan gives the tier."""
    records = tuple(
        RequestRecord(i / 10, 400, (TierVisit("small", 200, float(40 + (i * 37) % 41)),), 1.0) for i in range(50)
    )
    job = ReplanJob(str(replan_question(tmp_path, min_quality=80)), 2.0, records, ("large",))
    assert ReplanJob.from_json(job.to_json()) == job
    responses = list[Any]()
    solver.replan(job.to_json(), responses.append)
    plan, request = from_message(responses[0], PlanEvent), responses[1]
    assert isinstance(request, pb.PlanStagesRequest)
    assert request.tier == "large"
    work = workload_of(from_message(request.trace, Trace))
    assert 0 < len(work) <= 60
    assert work.rate_per_s <= 2.0 * 1.5
    assert (np.diff(work.arrival_s) >= 0).all()
    (group,) = plan.tiers[1].replicas
    assert request.replica.tp == group.tp
    responses.clear()
    solver.replan(dataclasses.replace(job, staged=()).to_json(), responses.append)
    assert len(responses) == 1


def test_planning_again_passes_over_what_routers_pass_over(tmp_path: Path) -> None:
    """Half of the requests are passed over by the small tier, which therefore gets half of them, whatever its threshold."""
    easy = RequestRecord(0.0, 400, (TierVisit("small", 200, 90.0),), predicted=(("small", 95.0),))
    hard = RequestRecord(0.0, 400, (TierVisit("large", 200, None),), predicted=(("small", 10.0),))
    question = str(replan_question(tmp_path, min_quality=60))
    drift = Drift(DRIFT.shifts, (Window(0.0, 25.0, (50,), (easy, hard) * 25),))

    def planned(job: ReplanJob) -> Any:
        responses = list[Any]()
        solver.replan(job.to_json(), responses.append)
        return from_message(responses[0], PlanEvent).tiers[0]

    def under(**fields: Any) -> ReplanJob:
        plan = Plan(1, (TierPlan("small", "s", 70.0, 1, **fields), TierPlan("large", "l", None, 1)))
        return replan_job(question, drift, plan)

    none = AcceptanceRules(skip_below=(None,), skip_for=(None,), long_answers=(None,))
    assert under() == ReplanJob(question, 2.0, (easy, hard) * 25, rules=none)
    assert planned(under()).share_processed == 1.0
    skipping = planned(under(skip_below=50.0))
    assert skipping.share_processed == pytest.approx(0.5, abs=0.1)
    assert skipping.threshold < 70
    assert planned(under(long_answers=LongAnswers(1, 0.0))).share_answered == 1.0


def replanner(workers: list[InstanceRecord]) -> Replanner:
    """One that knows these workers; nothing of it runs."""
    publisher = cast(PlanPublisher, SimpleNamespace(workers=lambda _: workers))
    store = cast(WorkloadStore, None)
    return Replanner(publisher, store, SolverPool(1), SystemClock(), 300.0, "question.yaml")


@pytest.mark.slow
async def test_what_serves_is_kept_where_it_cannot_be_replayed_and_goes_where_one_stage_is_better() -> None:
    """Short requests of one length crowd the one instance of their stage: five others are idle."""
    crowded = (Stage(0, 100, 1), Stage(100, 8192, 5))
    tier = TierPlan("small", "s", None, 6, crowded, QOE)
    plan = Plan(1, (tier,), source="drift", note="requests per second")
    latency = StepLatencyModel((0.0, 1.0), (1e-3, 1.001e-3))
    request = pb.PlanStagesRequest(
        tier="small",
        trace=to_message(Trace.of((i / 2000, 20, 4) for i in range(600)), pb.Trace),
        replica=to_message(
            measured_of(Replica(ReplicaShape(1, 1), latency, 50_000, EngineLimits(4, 512, 16))), pb.MeasuredReplica
        ),
    )

    def asked() -> pb.PlanStagesRequest:
        copy = pb.PlanStagesRequest()
        copy.CopyFrom(request)
        return copy

    assert await replanner([])._with_stages(plan, [asked()]) == plan
    assert await replanner([])._with_stages(plan, []) == plan
    card = ModelCard("small", "s", "d", "torch", 8191, 100, 16, 8, kv_bytes_per_token=1e5)
    load = Load((50,), kv_bytes_per_s=1e10)
    workers = [InstanceRecord(f"w{i}", Role.WORKER, "h", 1.0, 1, 3.0, model=card, load=load) for i in range(6)]
    changed = await replanner(workers)._with_stages(plan, [asked()])
    assert changed.tiers[0].stages == ()
    assert "small: Use one stage: replayed against 2 stages" in changed.note
    check_plan(changed)


class OnePlan:
    """The plan that holds, published as `PlanPublisher` does: only in place of the expected one."""

    def __init__(self, plan: Plan, mesh: MeshFile) -> None:
        self.current, self.refused, self.shapes = plan, 0, WorkerShapes(mesh)

    def workers(self, _: str) -> list[InstanceRecord]:
        return []

    async def publish(self, plan: Plan, expected: int | None = None, *, leading: bool) -> Plan:
        if expected is not None and expected != self.current.revision:
            self.refused += 1
            raise RevisionConflict(expected, self.current.revision)
        self.current = dataclasses.replace(plan, revision=self.current.revision + 1)
        return self.current


@pytest.mark.slow
async def test_a_plan_that_is_published_meanwhile_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was being computed is dropped, and the next drift is planned for again."""
    record = RequestRecord(0.0, 400, (TierVisit("small", 200, 90.0), TierVisit("large", 200, None)))
    drift = dataclasses.replace(DRIFT, evidence=(Window(0.0, 25.0, (50,), (record,) * 50),))
    tiers: list[dict[str, Any]] = [
        {"name": "small", "model": "s", "threshold": 99},
        {"name": "large", "model": "l", "engine": "torch"},
    ]
    mesh = load_mesh_file(write_mesh_file(tmp_path, tiers))
    holding = OnePlan(Plan(1, (TierPlan("small", "s", 99.0, 1), TierPlan("large", "l", None, 1))), mesh)
    operators = dataclasses.replace(holding.current, revision=2, source="operator", note="by hand")
    solvers, run = SolverPool(1), SolverPool.run

    async def overtaken(pool: SolverPool, method: str, payload: bytes) -> AsyncGenerator[bytes, None]:
        async for response in run(pool, method, payload):
            if holding.current.revision == 1:
                holding.current = operators
            yield response

    monkeypatch.setattr(SolverPool, "run", overtaken)
    replanner = Replanner(
        cast(PlanPublisher, holding),
        cast(WorkloadStore, None),
        solvers,
        SystemClock(),
        300.0,
        str(replan_question(tmp_path, min_quality=60)),
    )
    planning = asyncio.create_task(replanner._plan())
    async with asyncio.timeout(120):
        replanner._wanted.put_nowait(drift)
        while not holding.refused:
            await asyncio.sleep(0.01)
        assert holding.current == operators
        replanner._wanted.put_nowait(drift)
        while holding.current.source != "drift":
            await asyncio.sleep(0.01)
    small, large = holding.current.tiers
    assert sum(group.count for group in small.replicas) == small.instances
    assert {ReplicaShape.of(group) for group in large.replicas} <= {ReplicaShape(1, 1)}, "what its engine has"
    assert holding.refused == 1
    planning.cancel()
