"""Follows the live load between plans: how many workers each tier should have."""

import asyncio
import logging
from dataclasses import replace
from typing import NoReturn

from penstock.planner_service.live.load_scaling import ScalingRule, TierLoad, TierScale, within_gpus
from penstock.planner_service.live.plan_publisher import PlanPublisher
from penstock.services.background import BackgroundWork, Works
from penstock.services.clock import Clock
from penstock.services.domain.dispatch import wait_s
from penstock.services.domain.instances import DesiredWorkers, InstanceRecord
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.types.plans import Plan, TierPlan

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the load."""


class LoadScaler(BackgroundWork):
    """What the leading planner says should run, which is the plan's where the mesh file does not ask for more.

    A planner that begins to lead, and each new plan, begin with the plan's counts; a planner that begins also with the
    workers that serve already, if those are more.
    """

    def __init__(self, mesh: MeshFile, publisher: PlanPublisher, clock: Clock) -> None:
        self._mesh, self._publisher, self._clock = mesh, publisher, clock
        options = self._options = mesh.planner.scaling
        self._rule = ScalingRule(options.busy, options.rise_s, options.hold_s, mesh.slo.tightest_ttft_s)
        self._revision: int | None = None
        self._scales: dict[str, TierScale] = {}

    def work(self) -> Works:
        return {"scale-by-load": self._follow} if self._options.enabled else {}

    @property
    def desired(self) -> DesiredWorkers | None:
        """The counts of workers by tier; None while this planner does not lead, or without a plan."""
        plan = self._publisher.current
        if plan is None or not self._publisher.leads:
            return None
        planned = {tier.name: tier.instances for tier in plan.tiers}
        scales = self._scales if self._revision == plan.revision else {}
        gpus = {tier.name: self._publisher.shapes.gpus_of(tier) for tier in plan.tiers}
        most = sum(gpus.values()) if self._options.gpus is None else self._options.gpus
        most -= sum(count for name, count in gpus.items() if name not in scales)
        each = {
            tier.name: self._publisher.shapes.gpus_of(self._one(tier)) for tier in plan.tiers if tier.name in scales
        }
        counts = within_gpus({name: scale.workers for name, scale in scales.items()}, planned, each, most)
        return DesiredWorkers(plan.revision, tuple((planned | counts).items()))

    async def _follow(self) -> NoReturn:
        while True:
            if (plan := self._publisher.current) is not None and self._publisher.leads:
                self._look(plan)
            else:
                self._revision = None
            await asyncio.sleep(LOOK_S)

    def _look(self, plan: Plan) -> None:
        if plan.revision != self._revision:
            began, self._revision = self._revision is None, plan.revision
            self._scales = {
                tier.name: TierScale(self._first(tier, began=began), least=min(1, tier.instances))
                for tier in plan.tiers
                if self._scaled(tier)
            }
        before = self.desired
        limited, awaited = dict(before.counts) if before is not None else {}, self._publisher.awaited()
        for name, scale in self._scales.items():
            if limited.get(name, scale.workers) < scale.workers:  # no more GPUs: wait until others need fewer
                scale = replace(scale, workers=limited[name])
            load = replace(self._load(name), awaited=name in awaited)
            self._scales[name] = scale.after(load, self._rule, self._mesh.planner.max_instances)
        if (desired := self.desired) is not None and desired != before:
            _log.info("by the load there should be %s", ", ".join(f"{n} x {tier}" for tier, n in desired.counts))

    def _first(self, tier: TierPlan, *, began: bool) -> int:
        return max(tier.instances, len(self._publisher.workers(tier.name)) if began else 0)

    def _one(self, tier: TierPlan) -> TierPlan:
        """The tier with one instance, also if the plan has none."""
        return self._publisher.shapes.filled(replace(tier, instances=1))

    def _scaled(self, tier: TierPlan) -> bool:
        """Whether a tier's count may differ from its plan's: stages and several shapes are planned for a count."""
        return len(self._one(tier).replicas) == 1 and not tier.stages

    def _load(self, name: str) -> TierLoad:
        workers = self._publisher.workers(name)
        requests = sum(worker.load.requests for worker in workers if worker.load is not None)
        tier = self._mesh.tier(name)
        cards = [worker.model for worker in workers if worker.model is not None]
        places = max((card.max_requests - tier.max_queued for card in cards), default=tier.max_running)
        waits_s = sum(map(_wait_s, workers)) / max(1, len(workers))
        return TierLoad(self._clock.now(), len(workers), requests, max(1, places), waits_s)


def _wait_s(worker: InstanceRecord) -> float:
    """Until the prompts that a worker holds are computed, about; 0 where it does not tell how fast it is."""
    load = worker.load
    if load is None:
        return 0.0
    if load.slo is not None:
        return load.slo.backlog_s
    return wait_s(load.prompt_tokens, load.prompt_tokens_per_s)
