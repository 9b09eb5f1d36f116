"""Keeps the plan: publishes the mesh file's where none holds, and puts it back when Redis comes back without it."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import NoReturn

from penstock.planner_service.live.worker_shapes import WorkerShapes
from penstock.services.acceptance.pipeline import predicting
from penstock.services.acceptance.threshold import accepts_all
from penstock.services.background import BackgroundWork, Works
from penstock.services.clock import Clock
from penstock.services.domain.errors import Unavailable, check
from penstock.services.domain.instances import InstanceRecord, Role
from penstock.services.domain.plans import same_model
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.state.connection import StateUnavailable
from penstock.services.state.feed import MeshFeed
from penstock.services.state.leadership import Leadership
from penstock.services.state.plans import PlanStore
from penstock.types.plans import Plan, TierPlan
from penstock.types.problems import FieldProblem

_log = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often a planner looks who leads, and the leader whether Redis has the plan."""


class PlanPublisher(BackgroundWork):
    """Publishes plans, and remembers the current one for as long as the process lives.

    `seed` is the mesh file's plan. It becomes current at the start unless a plan made from the same file content is
    there already: so restarting the planner changes nothing, editing the file does, and what an operator set stays until
    the file is edited. What this class publishes by itself, it publishes only while this planner leads.
    """

    def __init__(
        self, store: PlanStore, leadership: Leadership, feed: MeshFeed, mesh: MeshFile, seed: Plan, clock: Clock
    ) -> None:
        self._store, self._leadership, self._feed, self._seed, self._clock = store, leadership, feed, seed, clock
        self._mesh, self.shapes = mesh, WorkerShapes(mesh)
        self._seeded, self._changed = False, asyncio.Event()

    def work(self) -> Works:
        return {"plan-publisher": self._keep}

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        with contextlib.suppress(StateUnavailable):
            await self._leadership.release()

    @property
    def leads(self) -> bool:
        """Whether this planner leads, of those that the mesh has."""
        return self._leadership.leads

    @property
    def current(self) -> Plan | None:
        return self._feed.view.plan

    def workers(self, tier: str) -> list[InstanceRecord]:
        """The tier's workers that take new requests."""
        return self._feed.view.workers(tier)

    def awaited(self) -> set[str]:
        """Tiers without an instance that requests of a router wait for."""
        loads = (router.load for router in self._feed.view.instances(Role.ROUTER))
        return {tier for load in loads if load is not None for tier in load.awaited}

    async def publish(self, plan: Plan, expected: int | None = None, *, leading: bool = False) -> Plan:
        """Make a plan current. leading: only if this planner leads, as for what no operator has asked for.

        Raises:
            NotLeading: another planner leads.
            InvalidRequest: a tier has more instances than may be, none has any, or the plan names a scorer that the
                judge does not have, or models or drafters that workers do not load, or shapes that they cannot have, or
                it routes by scores that nothing predicts.
            RevisionConflict: another plan than `expected` is current.
            StateUnavailable: Redis cannot be reached.
        """
        plan = dataclasses.replace(plan, tiers=tuple(map(self.shapes.filled, plan.tiers)))
        check(self._problems(plan))
        stamped = dataclasses.replace(
            plan,
            tiers=tuple(dataclasses.replace(tier, drafters=self._drafters(tier.name)) for tier in plan.tiers),
            source=plan.source or "operator",
            created_at=self._clock.wall(),
            input_digest=plan.input_digest or self._seed.input_digest,
        )
        known = self.current
        plan_revision = await self._store.publish(
            stamped,
            expected=expected,
            at_least=known.revision if known is not None else 0,
            leader=self._leadership.name if leading else None,
        )
        if self._feed.view.follow(plan_revision):  # not first with the next pull: Redis may be lost before that
            self.view_changed()
        _log.info("plan %d from %s", plan_revision.revision, plan_revision.source)
        return plan_revision

    def _problems(self, plan: Plan) -> Iterator[FieldProblem]:
        """Why the mesh cannot serve a plan. Its tiers: as shapes.filled returns them."""
        for i, tier in enumerate(plan.tiers):
            yield from self._tier_problems(tier, f"plan.tiers[{i}]")
        for i, tier in enumerate(plan.tiers[:-1]):
            # without predictions, one that accepts all would be sent every prompt
            if accepts_all(tier.threshold or 0.0) and not self._mesh.router.score_predictor:
                problem = f"{tier.name} accepts all: needs router.score_predictor in the mesh file"
                yield from (FieldProblem(f"plan.tiers[{i}].{field}", problem) for field in predicting(tier))
        nobody = not any(tier.instances for tier in plan.tiers)
        if nobody and any(tier.instances for tier in self._seed.tiers):  # else workers are started by other means
            yield FieldProblem("plan.tiers", "no tier has an instance: no request could be answered")
        scorers = [scorer.name for scorer in self._mesh.judge.scorers]
        if plan.scorer and plan.scorer not in scorers:
            has = ", ".join(scorers) or "no scorer at all"
            yield FieldProblem("plan.scorer", f"the judge has {has}, not '{plan.scorer[:80]}'")

    def _tier_problems(self, tier: TierPlan, at: str) -> Iterator[FieldProblem]:
        """A tier has one model at a time: its workers continue each other's replies, and its rules were fitted to it."""
        seeded, loaded = self._seed.tier(tier.name), self._drafters(tier.name)
        most = max(self._mesh.planner.max_instances, seeded.instances if seeded is not None else 0)
        if tier.instances > most:
            problem = f"must be at most {most}, not {tier.instances}: see planner.max_instances in the mesh file"
            yield FieldProblem(f"{at}.instances", problem)
        if seeded is not None and not same_model(seeded.model, tier.model):
            problem = f"workers of tier {tier.name} load {seeded.model}, not {tier.model[:200]}: no plan changes it"
            yield FieldProblem(f"{at}.model", f"{problem}; see tiers[].model in the mesh file")
        if tier.drafters and tier.drafters != loaded:
            problem = (
                f"workers of tier {tier.name} load {', '.join(loaded) or 'no drafters'} when they start, not "
                f"{', '.join(tier.drafters)[:200]}: see tiers[].speculation in the mesh file"
            )
            yield FieldProblem(f"{at}.drafters", problem)
        yield from self.shapes.problems(tier, at)

    def _drafters(self, tier: str) -> tuple[str, ...]:
        """What drafts in the tier's workers, which load it when they start."""
        seeded = self._seed.tier(tier)
        return seeded.drafters if seeded is not None else ()

    async def newer_than(self, revision: int) -> Plan:
        """The current plan, as soon as there is one newer than `revision`."""
        while (current := self.current) is None or current.revision <= revision:
            await self._changed.wait()
        return current

    def view_changed(self) -> None:
        """The feed has news: wake who waits for a plan."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep(self) -> NoReturn:
        """Lead if no other planner does; then seed once, and watch that Redis keeps holding the plan."""
        while True:
            try:
                if await self._leadership.hold():
                    await self._seed_or_restore()
            except Unavailable as error:
                _log.warning("cannot reach the plan: %s", error)
            await asyncio.sleep(LOOK_S)

    async def _seed_or_restore(self) -> None:
        stored, known = await self._store.current(), self.current
        if stored is None and known is not None:
            await self._store.publish(known, at_least=known.revision - 1, leader=self._leadership.name)
            _log.warning("Redis had lost the plan: plan %d is back", known.revision)
        elif not self._seeded and (stored is None or stored.input_digest != self._seed.input_digest):
            await self.publish(self._seed, leading=True)
        self._seeded = True
