"""The mesh as this router sees it."""

import asyncio
import time

from penstock.proto.router.v1 import router_pb2 as pb
from router_service.admission.admission_queue import AdmissionQueue
from router_service.migration.bidding import MoveAgent
from router_service.routing.instance_pool import InstancePool
from router_service.telemetry.stats import RouterStats
from services import proto_codec as common
from services.domain.instances import InstanceRecord


class MeshStatus:
    """Puts view, admission queue and counters into one answer."""

    def __init__(
        self, router_id: str, pool: InstancePool, queue: AdmissionQueue, stats: RouterStats, agent: MoveAgent
    ) -> None:
        self._router_id, self._pool, self._queue, self._stats = router_id, pool, queue, stats
        self._agent = agent

    def read(self) -> pb.MeshStatus:
        now, view = asyncio.get_running_loop().time(), self._pool.view
        plan = view.plan
        return pb.MeshStatus(
            taken_at=common.timestamp(time.time()),
            router_id=self._router_id,
            plan_revision=plan.revision if plan is not None else 0,
            state_connected=view.connected,
            state_age=common.duration(min(view.age_s(now), 1e9)),
            tiers=[self._tier(tier.name) for tier in plan.tiers] if plan is not None else [],
            instances=[self._instance(record, now) for record in (*view.instances(), *view.expired())],
            router=pb.RouterStatus(
                active_count=self._queue.active,
                waiting_count=self._queue.waiting,
                finished_count=self._stats.finished,
                failed_count=self._stats.failed,
                rejected_count=self._stats.rejected,
                failover_count=self._stats.failovers,
                migration_count=self._stats.migrations,
                advice_unmet_count=self._agent.stayed,
                requests_per_second=self._stats.requests_per_s(),
                time_to_first_token_p50=common.duration(self._stats.ttft_percentile(0.5)),
                time_to_first_token_p95=common.duration(self._stats.ttft_percentile(0.95)),
            ),
        )

    def _tier(self, name: str) -> pb.TierStatus:
        plan = self._pool.view.plan
        tier = plan.tier(name) if plan is not None else None
        assert tier is not None
        workers = self._pool.view.workers(name)
        loads = [w.load for w in workers if w.load is not None]
        return pb.TierStatus(
            name=name,
            model=tier.model,
            threshold=tier.threshold,
            planned_instance_count=tier.instances,
            live_instance_count=len(workers),
            running_count=sum(len(load.running_tokens) for load in loads),
            queued_count=sum(len(load.queued_tokens) for load in loads),
            output_tokens_per_second=sum(load.output_tokens_per_s for load in loads),
            answered_count=self._stats.answered[name],
            escalated_count=self._stats.escalated[name],
        )

    def _instance(self, record: InstanceRecord, now: float) -> pb.InstanceStatus:
        made = pb.InstanceStatus(
            instance_id=record.instance_id,
            role=record.role.value,
            address=record.address,
            state=self._state(record),
            age=common.duration(min(self._pool.view.heard_ago_s(record.instance_id, now), 1e9)),
        )
        if record.model is not None:
            made.tier, made.engine, made.kv_blocks = record.model.tier, record.model.engine, record.model.kv_blocks
        if record.place is not None:
            place = record.place
            made.place.stage, made.place.from_tokens, made.place.to_tokens = (
                place.stage,
                place.from_tokens,
                place.to_tokens,
            )
        if record.load is not None:
            made.running_count, made.queued_count = len(record.load.running_tokens), len(record.load.queued_tokens)
            made.free_kv_blocks = record.load.free_kv_blocks
            made.output_tokens_per_second = record.load.output_tokens_per_s
        return made

    def _state(self, record: InstanceRecord) -> pb.InstanceState.ValueType:
        if record.draining:
            return pb.INSTANCE_STATE_DRAINING
        ejected = self._pool.is_ejected(record.instance_id) or record in self._pool.view.expired()
        return pb.INSTANCE_STATE_EJECTED if ejected else pb.INSTANCE_STATE_READY
