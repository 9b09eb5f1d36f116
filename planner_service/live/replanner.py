"""Follows the workload, and lets a solver process plan again when it has drifted."""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import NoReturn

from penstock.mapper import from_message, to_message
from penstock.planner_service.codecs import proto_codec as codec
from penstock.planner_service.live.plan_publisher import PlanPublisher
from penstock.planner_service.live.replan_job import ReplanJob
from penstock.planner_service.live.rescheduling import Drift, DriftState, observe, rate_per_s
from penstock.planner_service.live.solver_pool import STAGES_LIMIT_S, SolverPool
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.services.acceptance.pipeline import rules_of_plan
from penstock.services.background import BackgroundWork, Works
from penstock.services.clock import Clock
from penstock.services.domain.errors import PenstockError
from penstock.services.domain.stages.places import with_instances
from penstock.services.domain.workload import Window, joined
from penstock.services.state.connection import StateUnavailable
from penstock.services.state.workload import WorkloadStore
from penstock.types.planned import CascadePlan, PlanEvent
from penstock.types.plans import Plan, TierPlan

_log = logging.getLogger(__name__)

GRACE_SHARE, GRACE_S = 0.1, 5.0  # routers get a tenth of a window, at most so long, to report it
SOURCE = "drift"
HELD_WINDOWS = 3.0
HELD_S = 15.0  # or as long, if windows are short


class Replanner(BackgroundWork):
    """Reads windows as they end, asks the drift rule, plans in the background, publishes.

    Windows that a plan was made after only move the rule's reference: so a restart finds the state again.
    A plan that is published meanwhile wins: the one being computed is dropped.

    Only the leading planner plans. The others keep the last drift for HELD_WINDOWS: the leader may end while it plans.
    question: path of the file, see MeshReplan.
    """

    def __init__(
        self,
        publisher: PlanPublisher,
        store: WorkloadStore,
        solvers: SolverPool,
        clock: Clock,
        window_s: float,
        question: str,
    ) -> None:
        self._publisher, self._store, self._solvers, self._clock = publisher, store, solvers, clock
        self._window_s, self._question = window_s, question
        self._state, self._started_s = DriftState(), clock.wall()
        self._last_id, self._waiting = "0", dict[float, list[Window]]()
        self._wanted: asyncio.Queue[Drift] = asyncio.Queue()
        self._held: tuple[Drift, int, float] | None = None  # with the plan's revision and the time when it was seen

    def work(self) -> Works:
        return {"drift": self._follow, "replan": self._plan}

    async def _follow(self) -> NoReturn:
        while True:
            try:
                await self._read()
            except StateUnavailable as error:
                _log.warning("the workload cannot be read: %s", error)
            if self._held is not None and self._publisher.leads:
                self._hand_over(*self._held)
                self._held = None
            await asyncio.sleep(min(1.0, self._window_s / 10))

    async def _read(self) -> None:
        """Take in every window that has ended and that all routers have had time to report."""
        plan = self._publisher.current
        if plan is None:
            return
        self._last_id, windows = await self._store.after(self._last_id)
        for window in windows:
            if window.seconds == self._window_s:  # others are of another mesh file
                self._waiting.setdefault(window.start_s, []).append(window)
        ripe = self._clock.wall() - min(GRACE_S, GRACE_SHARE * self._window_s)
        for start_s in sorted(s for s in self._waiting if s + self._window_s <= ripe):
            window = joined(self._waiting.pop(start_s))
            self._state, drift = observe(self._state, window)
            if drift is not None and not self._stale(window, plan):
                _log.info("the workload has drifted: %s", "; ".join(map(str, drift.shifts)))
                self._held = drift, plan.revision, self._clock.now()

    def _hand_over(self, drift: Drift, revision: int, seen_s: float) -> None:
        """Plan for a drift, unless the planner that led before has published since, or had time to find no better plan."""
        plan, waited_s = self._publisher.current, self._clock.now() - seen_s
        if plan is not None and plan.revision == revision and waited_s <= max(HELD_WINDOWS * self._window_s, HELD_S):
            self._wanted.put_nowait(drift)

    def _stale(self, window: Window, plan: Plan) -> bool:
        """Whether the plan was made knowing the window: by another publisher, or before this process was started."""
        ours = plan.source == SOURCE and window.end_s > self._started_s
        return window.end_s <= plan.created_at and not ours

    async def _plan(self) -> NoReturn:
        while True:
            drift = await self._wanted.get()
            while not self._wanted.empty():
                drift = self._wanted.get_nowait()  # only the newest counts
            before = self._publisher.current
            assert before is not None
            job = replan_job(self._question, drift, before)
            try:
                async with aclosing(self._solvers.run("Replan", job.to_json())) as responses:
                    first, *traced = [response async for response in responses]
                answer = from_message(pb.PlanCascadeResponse.FromString(first), PlanEvent)
                if not isinstance(answer, CascadePlan):
                    _log.warning("no plan for the new workload: %s", getattr(answer, "reason", ""))
                    continue
                plan = self._in_shapes(_follow_up(before, answer, drift), answer)
                plan = await self._with_stages(plan, [pb.PlanStagesRequest.FromString(each) for each in traced])
                if plan.tiers == before.tiers:
                    _log.info("planned again: plan %d is still the best", before.revision)
                    continue
                await self._publisher.publish(plan, expected=before.revision, leading=True)
            except PenstockError as error:
                _log.warning("not planned again: %s", error)

    def _in_shapes(self, plan: Plan, planned: CascadePlan) -> Plan:
        """The plan with the shapes that were found, where the tiers' engines have them."""
        tiers = [
            dataclasses.replace(tier, replicas=searched.replicas)
            if self._publisher.shapes.taken(tier.name, searched.replicas)
            else tier
            for tier, searched in zip(plan.tiers, planned.tiers, strict=True)
        ]
        return dataclasses.replace(plan, tiers=tuple(map(self._publisher.shapes.filled, tiers)))

    async def _with_stages(self, plan: Plan, traced: Sequence[pb.PlanStagesRequest]) -> Plan:
        """The plan with the length stages that pay against those it has, by a replay of what reaches each tier.

        A tier that cannot be replayed keeps its stages.
        """
        for request in traced:
            tier = plan.tier(request.tier)
            assert tier is not None
            request.against.extend([to_message(stage, pb.Stage) for stage in tier.stages])
            try:
                completed = codec.completed(request, tier, self._publisher.workers(tier.name))
                answer = await self._solvers.once("PlanStages", completed.SerializeToString(), STAGES_LIMIT_S)
            except PenstockError as error:
                _log.warning("the length stages of tier %s are kept, they were not replayed: %s", tier.name, error)
                continue
            plan = with_verdict(plan, tier, pb.PlanStagesResponse.FromString(answer))
        return plan


def replan_job(question: str, drift: Drift, plan: Plan) -> ReplanJob:
    """The job for what shows a drift. As the plan has them stay: tiers with length stages, and rules."""
    records = tuple(record for window in drift.evidence for record in window.records)
    staged = tuple(tier.name for tier in plan.tiers if tier.stages)
    return ReplanJob(question, rate_per_s(drift.evidence), records, staged, rules_of_plan(plan))


def _follow_up(before: Plan, plan: CascadePlan, drift: Drift) -> Plan:
    """The plan that held, with the thresholds and instance counts that were found. Its note says what went."""
    from penstock.planner_service.codecs.plan_file import served_tiers  # brings numpy and numba

    settings = served_tiers(plan)
    tiers = tuple(  # with their length stages, which keep their ranges
        dataclasses.replace(t, threshold=threshold, instances=count, stages=with_instances(t.stages, count))
        for t, (threshold, count) in zip(before.tiers, settings, strict=True)
    )
    without_stages = [
        f"{new.name} has fewer instances than length stages and serves all lengths with each"
        for old, new in zip(before.tiers, tiers, strict=True)
        if old.stages and not new.stages
    ]
    note = "; ".join([*map(str, drift.shifts), *without_stages])
    return dataclasses.replace(
        before, tiers=tiers, source=SOURCE, note=note, input_digest="", prediction=plan.prediction
    )


def with_verdict(plan: Plan, tier: TierPlan, response: pb.PlanStagesResponse) -> Plan:
    """The plan with a tier's stages as replayed, if the change pays; its note says so. Else the plan as it is."""
    _log.info("tier %s: %s", tier.name, response.verdict.sentence)
    if not response.verdict.favoured:
        return plan
    changed = codec.with_stages(tier, response)
    tiers = tuple(changed if each is tier else each for each in plan.tiers)
    return dataclasses.replace(plan, tiers=tiers, note=f"{plan.note}; {tier.name}: {response.verdict.sentence}")
