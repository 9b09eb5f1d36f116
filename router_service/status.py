"""The mesh as this router sees it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.router_service.admission.admission_queue import AdmissionQueue
from penstock.router_service.clients.judge_client import JudgeClient
from penstock.router_service.migration.bidding import MoveAgent
from penstock.router_service.routing.health_probes import CALLED
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.router_service.siblings.client import Siblings
from penstock.router_service.siblings.counters import total
from penstock.router_service.telemetry.stats import RouterStats
from penstock.services.domain.instances import InstanceRecord, Load
from penstock.services.process_slot import ProcessSlot
from penstock.types.mesh_status import (
    InstanceState,
    InstanceStatus,
    MeshStatus,
    ProcessCounters,
    RouterProcessStatus,
    TierStatus,
)
from penstock.types.plans import Plan, TierPlan

_BY_TIER = ("answered", "escalated", "accepted_draft_tokens", "rejected_draft_tokens")
_COUNTED_BY_REQUESTS = (*_BY_TIER, "finished", "failed", "rejected", "failovers", "migrations", "slo")
_SHOWN_AS_COUNTED = (
    *("active", "waiting", "finished", "failed", "rejected", "failovers"),
    *("migrations", "advice_unmet", "slo", "requests_per_s"),
)


@dataclass(frozen=True, slots=True)
class StatusReader:
    """Puts the view and the counters of all processes of this router into one answer.

    siblings: set if this process is one of several of a router.
    """

    instance_id: str
    pool: InstancePool
    queue: AdmissionQueue
    stats: RouterStats
    agent: MoveAgent
    judge: JudgeClient
    siblings: Siblings | None

    def counters(self) -> ProcessCounters:
        """The counters of this process."""
        counted = {name: getattr(self.stats, name) for name in _COUNTED_BY_REQUESTS}
        return ProcessCounters(
            active=self.queue.active,
            waiting=self.queue.waiting,
            advice_unmet=self.agent.stayed,
            requests_per_s=self.stats.requests_per_s(),
            ttft_s=self.stats.recent_ttft_s(),
            listening=self.siblings is None or self.siblings.listening,
            **counted,
        )

    async def read(self) -> MeshStatus:
        """The state of the mesh, and the sum of the counters of all processes of this router."""
        counted, processes, router_id = self.counters(), list[RouterProcessStatus](), self.instance_id
        if self.siblings is not None:
            slot = self.siblings.slot
            counters = {slot.index: counted, **await self.siblings.counters()}
            counted = total(part for part in counters.values() if part is not None)
            processes = [_process(slot, index, counters[index]) for index in sorted(counters)]
            router_id = slot.group_id
        now, view = asyncio.get_running_loop().time(), self.pool.view
        plan = view.plan
        return MeshStatus(
            router_id=router_id,
            plan_revision=plan.revision if plan is not None else 0,
            connected=view.connected,
            state_age_s=min(view.age_s(now), 1e9),
            tiers=tuple([self._tier(tier, counted) for tier in plan.tiers]) if plan is not None else (),
            instances=tuple([self._instance(group, now) for group in self._services()]),
            processes=tuple(processes),
            ttft_p50_s=counted.ttft_percentile(0.5),
            ttft_p95_s=counted.ttft_percentile(0.95),
            warnings=await self._warnings(plan),
            **{name: getattr(counted, name) for name in _SHOWN_AS_COUNTED},
        )

    async def _warnings(self, plan: Plan | None) -> tuple[str, ...]:
        judges = plan is not None and any(tier.threshold is not None for tier in plan.tiers)
        scorer = await self.judge.listed(plan.scorer) if plan is not None and judges else None
        return (scorer.warning,) if scorer is not None and scorer.warning else ()

    def _services(self) -> list[list[InstanceRecord]]:
        """All instances, grouped by service."""
        services: dict[str, list[InstanceRecord]] = {}
        view = self.pool.view
        for record in (*view.instances(), *view.expired(), *view.loading()):
            services.setdefault(record.group_id or record.instance_id, []).append(record)
        return [*services.values()]

    def _tier(self, tier: TierPlan, counted: ProcessCounters) -> TierStatus:
        workers = self.pool.view.reached_workers(tier.name)
        loads = [w.load for w in workers if w.load is not None]
        return TierStatus(
            name=tier.name,
            model=tier.model,
            threshold=tier.threshold,
            planned_instances=tier.instances,
            live_instances=len(workers),
            running=sum(len(load.running_tokens) for load in loads),
            queued=sum(len(load.queued_tokens) for load in loads),
            output_tokens_per_s=sum(load.output_tokens_per_s for load in loads),
            **{name: getattr(counted, name).get(tier.name, 0) for name in _BY_TIER},
        )

    def _instance(self, processes: Sequence[InstanceRecord], now: float) -> InstanceStatus:
        """The status of a service. Of several processes, the age is the greatest; it drains if all do."""
        record = min(processes, key=lambda process: process.draining)
        age_s = max(self.pool.view.heard_ago_s(process.instance_id, now) for process in processes)
        model, load = record.model, record.load or Load()
        return InstanceStatus(
            instance_id=record.group_id or record.instance_id,
            role=record.role.value,
            tier=model.tier if model is not None else record.tier,
            address=record.address,
            engine=model.engine if model is not None else "",
            state=self._state(record),
            running=len(load.running_tokens),
            queued=len(load.queued_tokens),
            free_kv_blocks=load.free_kv_blocks,
            kv_blocks=model.kv_blocks if model is not None else 0,
            output_tokens_per_s=load.output_tokens_per_s,
            age_s=min(age_s, 1e9),
            place=record.place,
            processes=len(processes),
            admin_address=record.admin_address,
            drafting=load.drafting,
            loading=load.loading,
            leads=load.leads,
            shape=model.shape if model is not None else "",
        )

    def _state(self, record: InstanceRecord) -> InstanceState:
        if record.draining:
            return InstanceState.DRAINING
        if record.tier:
            return InstanceState.LOADING
        if record.role in CALLED and self.pool.view.is_unreached(record):
            return InstanceState.UNREACHED
        ejected = self.pool.is_ejected(record.instance_id) or record in self.pool.view.expired()
        return InstanceState.EJECTED if ejected else InstanceState.READY


def _process(slot: ProcessSlot, index: int, counters: ProcessCounters | None) -> RouterProcessStatus:
    """The status of one process of the router. counters: None if it does not respond."""
    known, answering = counters or ProcessCounters(), counters is not None
    return RouterProcessStatus(index, slot.name_of(index), answering, known.active, known.waiting, known.finished)
