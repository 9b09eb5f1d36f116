"""Puts a worker together: engine, load tracker, servicer."""

import asyncio
from pathlib import Path

from penstock.worker.v1 import worker_pb2_grpc
from services.domain.instances import ModelCard
from services.domain.latency import StepLatencyModel
from services.runtime import Chassis
from services.settings import MeshTier, ServiceSettings, SettingsError
from worker_service.engine.interface import Engine, EngineUnusable
from worker_service.engine.loop import Hold
from worker_service.engine.simulated import SimulatedEngineOptions, simulated_engine
from worker_service.frames import FrameLimits
from worker_service.load_tracker import LoadTracker
from worker_service.servicer import SERVICE, WorkerServicer

HEARTBEAT_S = 2.0


async def compose(chassis: Chassis) -> None:
    """Start the engine and serve it. SettingsError for a tier or model that cannot be served."""
    settings = chassis.settings
    if not settings.tier:
        raise SettingsError("PENSTOCK_TIER: a worker must be told its tier")
    tier = chassis.mesh.tier(settings.tier)
    engine = build_engine(tier, settings)
    try:
        await engine.start()
    except EngineUnusable as error:
        raise SettingsError(f"tiers: {tier.name}: {error}") from error
    chassis.stack.push_async_callback(engine.close)
    chassis.watch(engine.failed())
    info = engine.info
    tracker = LoadTracker(engine, chassis.telemetry.meter, tier.name)
    frames = FrameLimits(settings.frame_interval_ms / 1000, settings.frame_tokens, HEARTBEAT_S)
    servicer = WorkerServicer(
        engine, tracker, frames, chassis.telemetry, instance_id=chassis.instance_id, tier=tier.name
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, chassis.server)
    chassis.health.offer(SERVICE)
    chassis.load = tracker.load
    chassis.model = ModelCard(
        tier=tier.name,
        model=info.model,
        digest=info.model_digest,
        engine=info.engine,
        max_context_tokens=info.max_context_tokens,
        kv_blocks=info.kv_blocks,
        kv_block_tokens=info.kv_block_tokens,
        max_requests=info.max_requests,
    )
    chassis.on_drain.append(servicer.drained)
    follow = asyncio.create_task(_announce(servicer, chassis))
    chassis.stack.callback(follow.cancel)


async def _announce(servicer: WorkerServicer, chassis: Chassis) -> None:
    """A Drain RPC is told to the mesh at once."""
    await servicer.draining.wait()
    chassis.announce_drain()


def build_engine(tier: MeshTier, settings: ServiceSettings) -> Engine:
    """The engine that a tier asks for, not started."""
    name = tier.served_model_name or Path(tier.model).name
    hold = Hold(settings.frame_interval_ms / 1000, settings.frame_tokens) if settings.frame_interval_ms else None
    if tier.engine == "simulated":
        simulated = tier.simulated
        return simulated_engine(
            SimulatedEngineOptions(
                name=name,
                latency=StepLatencyModel.linear(
                    simulated.overhead_ms * 1e-3, simulated.token_us * 1e-6, simulated.context_token_ns * 1e-9
                ),
                reply_tokens=simulated.reply_tokens,
                kv_tokens=tier.kv_tokens,
                kv_block_tokens=tier.kv_block_tokens,
                max_running=tier.max_running,
                max_queued=tier.max_queued,
                max_step_tokens=tier.max_step_tokens,
                max_context_tokens=tier.max_context_tokens or simulated.max_context_tokens,
            ),
            hold=hold,
        )
    if tier.engine == "sglang":
        from worker_service.engine.sglang import SglangEngine, SglangEngineOptions

        return SglangEngine(
            SglangEngineOptions(
                folder=settings.resolve(tier.model),
                name=name,
                endpoint=settings.sglang_endpoint or tier.sglang.endpoint,
                max_requests=tier.max_running + tier.max_queued,
                max_context_tokens=tier.max_context_tokens,
                start_timeout_s=tier.sglang.start_timeout_s,
                gone_s=tier.sglang.gone_s,
            )
        )
    from worker_service.engine.torch import TorchEngineOptions, torch_engine  # torch takes seconds to import

    return torch_engine(
        TorchEngineOptions(
            folder=settings.resolve(tier.model),
            name=name,
            device=tier.device,
            dtype=tier.dtype,
            kv_tokens=tier.kv_tokens,
            kv_block_tokens=tier.kv_block_tokens,
            max_running=tier.max_running,
            max_queued=tier.max_queued,
            max_step_tokens=tier.max_step_tokens,
            max_context_tokens=tier.max_context_tokens,
            threads=tier.threads,
        ),
        hold=hold,
    )
