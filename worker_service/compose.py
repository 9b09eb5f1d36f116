"""Composes the worker service: engine, load tracker, servicer."""

import asyncio
import functools
import os
from collections.abc import Callable
from typing import NoReturn

from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services.channels import ChannelPool
from penstock.services.domain.errors import NotFound
from penstock.services.domain.instances import ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.stages import bidding
from penstock.services.domain.stages.worth import move_s
from penstock.services.extensions.engines import engine_of, tier_in_shape, tier_problems
from penstock.services.field_problems import SettingsError, joined
from penstock.services.mesh_file import load_mesh_file
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.processes import exits_on_unusable_settings
from penstock.services.runtime import Chassis
from penstock.services.settings import ServiceSettings
from penstock.services.state.feed import MeshFeed
from penstock.services.state.keys import tier_group
from penstock.services.telemetry import observe_unusable_entries
from penstock.worker_service.clients.peer_client import dial
from penstock.worker_service.engine.extension import EngineExtension, EngineSite, untold
from penstock.worker_service.engine.held_tokens import OutputCoalescing
from penstock.worker_service.engine.interface import Capability, Engine, EngineUnusable, Interruptible, KvTransferring
from penstock.worker_service.migration.receiver import KvReceiver
from penstock.worker_service.migration.sender import KvSender
from penstock.worker_service.replies.heartbeats import Heartbeats
from penstock.worker_service.replies.replies import Replies
from penstock.worker_service.servicer import SERVICE, WorkerServicer
from penstock.worker_service.stages.stage_tracker import StageTracker
from penstock.worker_service.stages.transfer_queue import TransferQueue
from penstock.worker_service.telemetry.load_tracker import LoadTracker

HEARTBEAT_S = 2.0


async def compose(chassis: Chassis) -> None:
    """Start the engine and add the worker service to the server.

    Raises:
        SettingsError: The tier or its model cannot be served.
    """
    settings = chassis.settings
    tier = _own_tier(chassis.mesh, settings)
    shape = engine_of(chassis.mesh, tier).shape(tier)
    engine = build_engine(chassis.mesh, tier, settings, chassis.loading)
    try:
        await engine.start()
    except EngineUnusable as error:
        raise SettingsError(f"tiers: {tier.name}: {error}") from error
    chassis.stack.push_async_callback(engine.close)
    chassis.watch(engine.failed())
    info, meter, options = engine.info, chassis.telemetry.meter, chassis.mesh.stages
    tracker = LoadTracker(engine, meter, tier.name)
    view, slots = MeshView(), bidding.TransferSlots(options.max_transfers)
    bids = bidding.Sender(slots)
    moves_s = functools.partial(_move_s, tracker, _kv_token_bytes(engine))
    stages = StageTracker(chassis.instance_id, tier.name, view, bids, refine_s=options.refine_s, move_s=moves_s)
    group, look_s = tier_group(tier.name), options.look_s
    feed = MeshFeed(chassis.redis, chassis.keys, view, interval_s=look_s, group=group, sample=stages.sample)
    await chassis.stack.enter_async_context(feed)
    observe_unusable_entries(meter, lambda: feed.unusable_entries)
    transfers = TransferQueue(
        chassis.instance_id, slots, bids, engine, tracker.load, meter, max_running=tier.max_running, tier=tier.name
    )
    sender: KvSender | None = None
    receiver: KvReceiver | None = None
    if isinstance(engine, KvTransferring):
        connect = functools.partial(dial, await chassis.stack.enter_async_context(ChannelPool(chassis.certificates)))
        fixed = options.kv_bandwidth_gb_per_s
        bytes_per_s = None if fixed is None else fixed * 1e9
        most, shares_memory = options.max_transfers, options.shared_memory
        sender = KvSender(engine, connect, meter, most, shares_memory=shares_memory, bytes_per_s=bytes_per_s)
        bandwidth = sender.bandwidth
        tracker.kv_bytes_per_s = lambda: bandwidth.bytes_per_s
        receiver = KvReceiver(engine, most)
        chassis.stack.push_async_callback(sender.close)
        chassis.stack.push_async_callback(receiver.close)
    heartbeats = Heartbeats(HEARTBEAT_S)
    replies = Replies(
        engine, stages, heartbeats, meter, instance_id=chassis.instance_id, tier=tier.name, receiver=receiver
    )
    find = functools.partial(_address_of, feed)
    servicer = WorkerServicer(
        engine, tracker, replies, transfers, chassis.telemetry, address_of=find, sender=sender, receiver=receiver
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
        gives_logprobs=Capability.LOGPROBS in info.capabilities,
        shape=shape.name if shape is not None else "",
    )
    chassis.on_drain.append(replies.drained)
    chassis.supervise("announce-drain", lambda: _announce_drain(servicer, chassis), endless=False)
    chassis.supervise("stage-watch", lambda: _watch(stages, feed, tracker, servicer, options.look_s))
    if isinstance(engine, Interruptible):
        announce = functools.partial(_announce_availability, engine, servicer, chassis)
        chassis.supervise("engine-availability", announce)


def run_server_part(settings: ServiceSettings) -> NoReturn:
    """Become the part of a worker's server that `settings.server_node` says, on a node that is not the worker's own."""
    with exits_on_unusable_settings(Role.WORKER.value):
        mesh = load_mesh_file(settings.mesh_file)
        tier = _own_tier(mesh, settings)
        part = _checked_engine(mesh, tier, settings).server_part(EngineSite(mesh, tier, settings))
    os.execvpe(part.command[0], part.command, {**os.environ, **part.environment})


def _own_tier(mesh: MeshFile, settings: ServiceSettings) -> MeshTier:
    """The tier of this worker, in its shape."""
    if not settings.tier:
        raise SettingsError("PENSTOCK_TIER: required for a worker")
    return tier_in_shape(mesh, mesh.tier(settings.tier), settings.shape)


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


def build_engine(
    mesh: MeshFile, tier: MeshTier, settings: ServiceSettings, progress: Callable[[float], None] = untold
) -> Engine:
    """Create the engine of a tier, without starting it. progress: as in EngineSite.

    Raises:
        SettingsError: `penstock check` refuses the tier, or something that it names is missing.
    """
    engine = _checked_engine(mesh, tier, settings)
    delay_s = settings.frame_interval_ms / 1000
    hold = OutputCoalescing(delay_s, settings.frame_tokens) if delay_s else None
    return engine.build(EngineSite(mesh, tier, settings, hold, progress))


def _checked_engine(mesh: MeshFile, tier: MeshTier, settings: ServiceSettings) -> EngineExtension:
    if problems := tier_problems(mesh, tier, settings):
        raise SettingsError(joined(problems), problems)
    engine = engine_of(mesh, tier)
    if not isinstance(engine, EngineExtension):
        raise SettingsError(f"tiers: {tier.name}: engine: '{tier.engine}' is no EngineExtension")
    return engine
