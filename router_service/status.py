"""The mesh as this router sees it."""

import asyncio
import time
from collections.abc import Sequence

from penstock.proto.router.v1 import router_pb2 as pb
from router_service.admission.admission_queue import AdmissionQueue
from router_service.domain.burst_counts import BurstCounts
from router_service.migration.bidding import MoveAgent
from router_service.routing.burst_steps import BurstSteps
from router_service.routing.instance_pool import InstancePool
from router_service.siblings.client import Siblings
from router_service.siblings.counters import ProcessCounters, total
from router_service.siblings.servicer import slo_counters_to_proto
from router_service.telemetry.stats import RouterStats
from services import proto_codec as common
from services.domain.burst_control import BurstReason
from services.domain.instances import InstanceRecord
from services.domain.plans import TierPlan
from services.process_slot import ProcessSlot

_BURST_REASONS = {
    BurstReason.LOAD: pb.BURST_REASON_LOAD,
    BurstReason.CALM: pb.BURST_REASON_CALM,
    BurstReason.BUDGET_SPENT: pb.BURST_REASON_BUDGET_SPENT,
    BurstReason.BUDGET_RECOVERED: pb.BURST_REASON_BUDGET_RECOVERED,
}


class MeshStatus:
    """Puts the view and the counters of all processes of this router into one answer."""

    def __init__(
        self,
        instance_id: str,
        pool: InstancePool,
        queue: AdmissionQueue,
        stats: RouterStats,
        agent: MoveAgent,
        bursts: BurstSteps,
        siblings: Siblings | None = None,
    ) -> None:
        """siblings: set if this process is one of several of a router."""
        self._instance_id, self._pool, self._queue, self._stats, self._agent = instance_id, pool, queue, stats, agent
        self._bursts, self._siblings = bursts, siblings

    def counters(self) -> ProcessCounters:
        """The counters of this process."""
        stats = self._stats
        return ProcessCounters(
            active=self._queue.active,
            waiting=self._queue.waiting,
            finished=stats.finished,
            failed=stats.failed,
            rejected=stats.rejected,
            failovers=stats.failovers,
            migrations=stats.migrations,
            advice_unmet=self._agent.stayed,
            requests_per_s=stats.requests_per_s(),
            ttft_s=stats.recent_ttft_s(),
            answered=stats.answered,
            escalated=stats.escalated,
            accepted_draft_tokens=stats.accepted_draft_tokens,
            rejected_draft_tokens=stats.rejected_draft_tokens,
            slo=stats.slo,
            listening=self._siblings is None or self._siblings.listening,
            burst=self._bursts.counts(),
        )

    async def read(self) -> pb.MeshStatus:
        """The state of the mesh, and the sum of the counters of all processes of this router."""
        counted, processes, router_id = self.counters(), list[pb.RouterProcessStatus](), self._instance_id
        if self._siblings is not None:
            slot = self._siblings.slot
            counters = {slot.index: counted, **await self._siblings.counters()}
            counted = total(part for part in counters.values() if part is not None)
            processes = [_process(slot, index, counters[index]) for index in sorted(counters)]
            router_id = slot.group_id
        now, view = asyncio.get_running_loop().time(), self._pool.view
        plan = view.plan
        return pb.MeshStatus(
            taken_at=common.timestamp(time.time()),
            router_id=router_id,
            plan_revision=plan.revision if plan is not None else 0,
            state_connected=view.connected,
            state_age=common.duration(min(view.age_s(now), 1e9)),
            tiers=[self._tier(tier, counted) for tier in plan.tiers] if plan is not None else [],
            instances=[self._instance(group, now) for group in self._services()],
            processes=processes,
            router=pb.RouterStatus(
                active_count=counted.active,
                waiting_count=counted.waiting,
                finished_count=counted.finished,
                failed_count=counted.failed,
                rejected_count=counted.rejected,
                failover_count=counted.failovers,
                migration_count=counted.migrations,
                advice_unmet_count=counted.advice_unmet,
                slo=slo_counters_to_proto(counted.slo),
                requests_per_second=counted.requests_per_s,
                time_to_first_token_p50=common.duration(counted.ttft_percentile(0.5)),
                time_to_first_token_p95=common.duration(counted.ttft_percentile(0.95)),
                burst=self._burst(counted.burst),
            ),
        )

    def _burst(self, counted: BurstCounts | None) -> pb.BurstStatus | None:
        """counted: of all processes."""
        plan = self._pool.view.plan
        if counted is None or plan is None or plan.burst is None:
            return None
        return pb.BurstStatus(
            step=counted.step,
            step_count=len(plan.burst.steps),
            mean_quality=plan.burst.mean_quality,
            window_quality=counted.window_quality,
            budget_left_share=counted.budget_left,
            out_of_budget=counted.out_of_budget,
            change_count=counted.changes,
            arrivals_per_second=self._bursts.arrivals_per_s(),
            changes=[
                pb.BurstChange(
                    at=common.timestamp(at),
                    from_step=change.before,
                    to_step=change.after,
                    reason=_BURST_REASONS[change.reason],
                )
                for at, change in self._bursts.last_changes
            ],
        )

    def _services(self) -> list[list[InstanceRecord]]:
        """All instances, grouped by service."""
        services: dict[str, list[InstanceRecord]] = {}
        for record in (*self._pool.view.instances(), *self._pool.view.expired()):
            services.setdefault(record.group_id or record.instance_id, []).append(record)
        return [*services.values()]

    def _tier(self, tier: TierPlan, counted: ProcessCounters) -> pb.TierStatus:
        workers = self._pool.view.workers(tier.name)
        loads = [w.load for w in workers if w.load is not None]
        return pb.TierStatus(
            name=tier.name,
            model=tier.model,
            threshold=tier.threshold,
            planned_instance_count=tier.instances,
            live_instance_count=len(workers),
            running_count=sum(len(load.running_tokens) for load in loads),
            queued_count=sum(len(load.queued_tokens) for load in loads),
            output_tokens_per_second=sum(load.output_tokens_per_s for load in loads),
            answered_count=counted.answered.get(tier.name, 0),
            escalated_count=counted.escalated.get(tier.name, 0),
            accepted_draft_token_count=counted.accepted_draft_tokens.get(tier.name, 0),
            rejected_draft_token_count=counted.rejected_draft_tokens.get(tier.name, 0),
        )

    def _instance(self, processes: Sequence[InstanceRecord], now: float) -> pb.InstanceStatus:
        """The status of a service. Of several processes, the age is the greatest; it drains if all do."""
        record = min(processes, key=lambda process: process.draining)
        age_s = max(self._pool.view.heard_ago_s(process.instance_id, now) for process in processes)
        status = pb.InstanceStatus(
            instance_id=record.group_id or record.instance_id,
            role=record.role.value,
            address=record.address,
            state=self._state(record),
            age=common.duration(min(age_s, 1e9)),
            process_count=len(processes),
            admin_address=record.admin_address,
        )
        if record.model is not None:
            status.tier, status.engine, status.kv_blocks = (
                record.model.tier,
                record.model.engine,
                record.model.kv_blocks,
            )
        if record.place is not None:
            place = record.place
            status.place.stage, status.place.from_tokens, status.place.to_tokens = (
                place.stage,
                place.from_tokens,
                place.to_tokens,
            )
        if record.load is not None:
            status.running_count, status.queued_count = len(record.load.running_tokens), len(record.load.queued_tokens)
            status.free_kv_blocks = record.load.free_kv_blocks
            status.output_tokens_per_second = record.load.output_tokens_per_s
            drafting = record.load.drafting
            if drafting is not None:
                status.drafting.CopyFrom(
                    pb.Drafting(
                        chain=drafting.chain,
                        window_tokens=drafting.window,
                        accepted_share=drafting.accepted_share,
                    )
                )
        return status

    def _state(self, record: InstanceRecord) -> pb.InstanceState.ValueType:
        if record.draining:
            return pb.INSTANCE_STATE_DRAINING
        ejected = self._pool.is_ejected(record.instance_id) or record in self._pool.view.expired()
        return pb.INSTANCE_STATE_EJECTED if ejected else pb.INSTANCE_STATE_READY


def _process(slot: ProcessSlot, index: int, counters: ProcessCounters | None) -> pb.RouterProcessStatus:
    """The status of one process of the router. counters: None if it does not respond."""
    status = pb.RouterProcessStatus(index=index, instance_id=slot.name_of(index), answering=counters is not None)
    if counters is not None:
        status.active_count, status.waiting_count = counters.active, counters.waiting
        status.finished_count = counters.finished
    return status
