"""Composes the worker service: engine, load tracker, servicer."""

import asyncio
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.proto.worker.v1 import worker_pb2_grpc
from services.channels import ChannelPool
from services.domain.errors import NotFound, PenstockError
from services.domain.instances import ModelCard
from services.domain.latency import StepLatencyModel
from services.domain.mesh_view import MeshView
from services.domain.stages import bidding
from services.domain.stages.worth import move_s
from services.field_problems import SettingsError
from services.mesh_schema import DEFAULT_KV_TOKENS, DEFAULT_STEP_TOKENS, MeshFile, MeshTier
from services.model_folder import model_folder
from services.runtime import Chassis
from services.settings import ServiceSettings, environment_value
from services.state import MeshFeed
from services.state.keys import tier_group
from services.telemetry import observe_unusable_entries
from worker_service.devices import worker_device
from worker_service.engine.interface import Capability, Engine, EngineUnusable, Interruptible, KvTransferring
from worker_service.engine.loop import OutputCoalescing
from worker_service.engine.simulated import SimulatedEngineOptions, simulated_engine
from worker_service.load_tracker import LoadTracker
from worker_service.migration.receiver import KvReceiver
from worker_service.migration.sender import KvSender
from worker_service.output_coalescing import CoalescingLimits, OutputCoalescer
from worker_service.peer_client import PeerClient
from worker_service.replies import Replies
from worker_service.scheduling import PolicyName
from worker_service.servicer import SERVICE, WorkerServicer
from worker_service.stage_tracker import StageTracker
from worker_service.transfer_queue import TransferQueue

if TYPE_CHECKING:
    from worker_service.engine.remote import RemoteEngineOptions

_log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
MEASURE_AGAIN_S = 1.0
"""After this long without another worker, or after a measurement that failed, it is tried again."""


async def compose(chassis: Chassis) -> None:
    """Start the engine and add the worker service to the server.

    Raises:
        SettingsError: The tier or its model cannot be served.
    """
    settings = chassis.settings
    if not settings.tier:
        raise SettingsError("PENSTOCK_TIER: required for a worker")
    tier = chassis.mesh.tier(settings.tier)
    drafters = drafter_folders(chassis.mesh, tier, settings)
    engine = build_engine(tier, settings, drafters, tightest_tpot_s=chassis.mesh.slo.tightest_tpot_s)
    try:
        await engine.start()
    except EngineUnusable as error:
        raise SettingsError(f"tiers: {tier.name}: {error}") from error
    chassis.stack.push_async_callback(engine.close)
    chassis.watch(engine.failed())
    info = engine.info
    tracker = LoadTracker(engine, chassis.telemetry.meter, tier.name)
    limits = CoalescingLimits(settings.frame_interval_ms / 1000, settings.frame_tokens, HEARTBEAT_S)
    options, view, slots = chassis.mesh.stages, MeshView(), bidding.TransferSlots(chassis.mesh.stages.max_transfers)
    bids = bidding.Sender(slots)
    stages = StageTracker(
        chassis.instance_id,
        tier.name,
        view,
        bids,
        refine_s=options.refine_s,
        move_s=functools.partial(_move_s, tracker, _kv_token_bytes(engine)),
    )
    feed = await chassis.stack.enter_async_context(
        MeshFeed(
            chassis.redis,
            chassis.keys,
            view,
            interval_s=options.look_s,
            group=tier_group(tier.name),
            sample=stages.sample,
        )
    )
    observe_unusable_entries(chassis.telemetry.meter, lambda: feed.unusable_entries)
    transfers = TransferQueue(
        chassis.instance_id,
        slots,
        bids,
        tracker.load,
        chassis.telemetry.meter,
        model_digest=info.model_digest,
        kv_block_tokens=info.kv_block_tokens,
        max_running=tier.max_running,
        can_receive=isinstance(engine, KvTransferring),
        tier=tier.name,
    )
    sender: KvSender | None = None
    receiver: KvReceiver | None = None
    if isinstance(engine, KvTransferring):
        channels = await chassis.stack.enter_async_context(ChannelPool(chassis.certificates))
        fixed = options.kv_bandwidth_gb_per_s
        sender = KvSender(
            engine,
            PeerClient(channels).dial,
            chassis.telemetry.meter,
            options.max_transfers,
            shares_memory=options.shared_memory,
            bytes_per_s=None if fixed is None else fixed * 1e9,
        )
        bandwidth = sender.bandwidth
        tracker.kv_bytes_per_s = lambda: bandwidth.bytes_per_s
        receiver = KvReceiver(engine, options.max_transfers)
        chassis.stack.push_async_callback(sender.close)
        chassis.stack.push_async_callback(receiver.close)
    replies = Replies(
        engine,
        stages,
        OutputCoalescer(limits),
        chassis.telemetry.meter,
        instance_id=chassis.instance_id,
        tier=tier.name,
        receiver=receiver,
    )
    servicer = WorkerServicer(
        engine,
        tracker,
        replies,
        transfers,
        chassis.telemetry,
        instance_id=chassis.instance_id,
        tier=tier.name,
        address_of=functools.partial(_address_of, feed),
        sender=sender,
        receiver=receiver,
    )
    chassis.stack.callback(servicer.text_work.close)
    for server in (chassis.server, chassis.admin):
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    chassis.health.offer(SERVICE)
    chassis.load, chassis.place = tracker.load, lambda: stages.place
    chassis.model = ModelCard(
        tier=tier.name,
        model=info.model,
        digest=info.model_digest,
        engine=info.engine,
        max_context_tokens=info.max_context_tokens,
        kv_blocks=info.kv_blocks,
        kv_block_tokens=info.kv_block_tokens,
        max_requests=info.max_requests,
        tool_format=form.name if (form := engine.tokenizer.tool_format) is not None else "",
        tokenizer_digest=engine.tokenizer.digest,
        takes_drafts=Capability.DRAFTS in info.capabilities,
        reasoning_format=marks.name if (marks := engine.tokenizer.reasoning_format) is not None else "",
        kv_bytes_per_token=_kv_token_bytes(engine),
    )
    chassis.on_drain.append(servicer.drained)
    chassis.supervise("announce-drain", lambda: _announce_drain(servicer, chassis), endless=False)
    chassis.supervise("stage-watch", lambda: _watch(stages, feed, tracker, servicer, options.look_s))
    if isinstance(engine, KvTransferring) and sender is not None:
        measuring = functools.partial(
            _measure_bandwidth, sender, feed, view, tier.name, chassis.instance_id, _kv_token_bytes(engine)
        )
        chassis.supervise("kv-bandwidth", measuring, endless=False)
    if isinstance(engine, Interruptible):
        interruptible = engine
        chassis.supervise("engine-availability", lambda: _announce_availability(interruptible, servicer, chassis))


async def _address_of(feed: MeshFeed, instance_id: str) -> str:
    """The address of a worker of this tier that accepts new requests.

    Raises:
        NotFound: The registry has no such worker.
        StateUnavailable: It is not known yet, and Redis cannot be reached.
    """
    record = await feed.find(instance_id)
    if record is None or record.draining:
        raise NotFound("worker", instance_id)
    return record.address


async def _announce_drain(servicer: WorkerServicer, chassis: Chassis) -> None:
    """Announce a Drain RPC to the mesh at once."""
    await servicer.draining.wait()
    chassis.announce_drain(True)


async def _announce_availability(engine: Interruptible, servicer: WorkerServicer, chassis: Chassis) -> None:
    """Announce the instance as draining while its engine is unavailable."""
    async for available in engine.availability():
        chassis.announce_drain(servicer.draining.is_set() or not available)


def _kv_token_bytes(engine: Engine) -> float:
    """KV that a move sends per token; 0 if requests move without KV, or not at all."""
    return engine.kv_layout.token_bytes if isinstance(engine, KvTransferring) else 0.0


def _move_s(tracker: LoadTracker, token_bytes: float, tokens: int) -> float | None:
    """How long a move takes; None while the bandwidth is not known."""
    bytes_per_s = tracker.kv_bytes_per_s()
    return move_s(tokens, token_bytes, bytes_per_s) if bytes_per_s > 0 or token_bytes == 0 else None


async def _measure_bandwidth(
    sender: KvSender, feed: MeshFeed, view: MeshView, tier: str, instance_id: str, token_bytes: float
) -> None:
    """Measure once at which rate KV moves, to the next worker of the tier by id: so each measures with another one."""
    if token_bytes == 0:
        return
    await feed.synced.wait()
    failures = 0
    while not sender.bandwidth.known:
        others = [record for record in view.workers(tier) if record.instance_id != instance_id]
        after = [record for record in others if record.instance_id > instance_id] or others
        if others:
            try:
                await sender.measure(after[failures % len(after)].address)
            except PenstockError as error:
                failures += 1
                _log.info("KV bandwidth is not measured yet: %s", error)
        if not sender.bandwidth.known:
            await asyncio.sleep(MEASURE_AGAIN_S)


async def _watch(
    stages: StageTracker, feed: MeshFeed, tracker: LoadTracker, servicer: WorkerServicer, look_s: float
) -> None:
    """Check the stage of the worker periodically."""
    await feed.synced.wait()
    loop = asyncio.get_running_loop()
    while True:
        stages.draining = servicer.draining.is_set()
        stages.look(tracker.load(), loop.time())
        await asyncio.sleep(look_s)


def drafter_folders(mesh: MeshFile, tier: MeshTier, settings: ServiceSettings) -> tuple[Path, ...]:
    """The folders of the models that draft for a tier.

    Raises:
        SettingsError: A model cannot be downloaded.
    """
    models = {other.name: other.model for other in mesh.tiers}
    # Tiers may share a model, which is loaded once.
    return tuple(dict.fromkeys(model_folder(settings, models.get(name, name)) for name in mesh.drafters(tier)))


def build_engine(
    tier: MeshTier,
    settings: ServiceSettings,
    drafters: tuple[Path, ...] = (),
    *,
    tightest_tpot_s: float | None = None,
) -> Engine:
    """Create the engine of a tier, without starting it.

    drafters: folders of the models that draft. tightest_tpot_s: the tightest pace of the mesh's SLO classes; None for none.
    """
    name = tier.served_name
    hold = (
        OutputCoalescing(settings.frame_interval_ms / 1000, settings.frame_tokens)
        if settings.frame_interval_ms
        else None
    )
    if tier.engine == "simulated":
        simulated = tier.simulated
        return simulated_engine(
            SimulatedEngineOptions(
                name=name,
                latency=StepLatencyModel.linear(
                    simulated.overhead_ms * 1e-3, simulated.token_us * 1e-6, simulated.context_token_ns * 1e-9
                ),
                reply_tokens=simulated.reply_tokens,
                kv_tokens=tier.kv_tokens or DEFAULT_KV_TOKENS,
                kv_block_tokens=tier.kv_block_tokens,
                max_running=tier.max_running,
                max_queued=tier.max_queued,
                max_step_tokens=tier.max_step_tokens or DEFAULT_STEP_TOKENS,
                max_context_tokens=tier.max_context_tokens or simulated.max_context_tokens,
                batch_policy=PolicyName(tier.batch_policy),
                best_effort_reserve=tier.best_effort_reserve,
            ),
            hold=hold,
        )
    refused = {"sglang": ("prefill_first",), "openai": ("prefill_first", "slo")}.get(tier.engine, ())
    if tier.batch_policy in refused:
        raise SettingsError(
            f"tiers: {tier.name}: batch_policy: '{tier.batch_policy}' is not for the {tier.engine} engine"
        )
    if tier.engine == "openai":
        from worker_service.engine.remote import RemoteEngine

        return RemoteEngine(_remote_options(tier))
    if tier.engine == "sglang":
        from worker_service.sglang_tier import sglang_engine  # tokenizers take a second to import

        return sglang_engine(tier, settings, hold, tightest_tpot_s)
    from worker_service.engine.torch import TorchEngineOptions, torch_engine  # torch takes seconds to import

    return torch_engine(
        TorchEngineOptions(
            folder=model_folder(settings, tier.model),
            name=name,
            device=worker_device(tier.device, settings.worker_index),
            dtype=tier.dtype,
            kv_tokens=tier.kv_tokens,
            kv_block_tokens=tier.kv_block_tokens,
            max_running=tier.max_running,
            max_queued=tier.max_queued,
            max_step_tokens=tier.max_step_tokens or DEFAULT_STEP_TOKENS,
            max_context_tokens=tier.max_context_tokens,
            threads=tier.threads,
            tool_format=tier.tool_format,
            batch_policy=PolicyName(tier.batch_policy),
            best_effort_reserve=tier.best_effort_reserve,
            drafters=drafters,
            skips_drafters=tier.speculation.drafters == "auto",
            max_window=tier.speculation.max_window,
        ),
        hold=hold,
    )


def _remote_options(tier: MeshTier) -> "RemoteEngineOptions":
    """The options of a remote tier's engine.

    Raises:
        SettingsError: The environment variable of the key is not set.
    """
    from worker_service.engine.remote import DEFAULT_REMOTE_CONTEXT, RemoteEngineOptions

    remote = tier.openai
    key = environment_value(remote.key_env) if remote.key_env else ""
    if key is None:
        problem = f"the environment variable {remote.key_env} is not set"
        raise SettingsError(f"tiers: {tier.name}: openai.key_env: {problem}")
    return RemoteEngineOptions(
        model=tier.model,
        name=tier.served_name,
        endpoints=remote.endpoints,
        key=key,
        extensions=frozenset(remote.extensions),
        limit_field=remote.limit_field,
        max_requests=tier.max_running + tier.max_queued,
        max_context_tokens=tier.max_context_tokens or DEFAULT_REMOTE_CONTEXT,
        silence_s=remote.silence_s,
        start_timeout_s=remote.start_timeout_s,
    )
