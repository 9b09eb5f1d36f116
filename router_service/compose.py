"""Puts the router together: feed, peers, driver, gRPC and HTTP faces."""

import asyncio
import logging
import random

from penstock.router.v1 import router_pb2_grpc
from router_service.bid_client import BidClient
from router_service.bidding import BidLimits, MoveAgent
from router_service.gate import Gate
from router_service.generation import Patience, TierGeneration
from router_service.judge_client import JudgeClient
from router_service.openai_gateway import OpenAiGateway
from router_service.peers import Peers
from router_service.reply_session import SessionPool
from router_service.request_driver import RequestDriver
from router_service.sampling import WindowSampler, WorkloadReporter
from router_service.servicer import MESH_SERVICE, ROUTER_SERVICE, Draining, MeshServicer, RouterServicer
from router_service.stats import RouterStats
from router_service.status import MeshStatus
from router_service.worker_client import WorkerClient
from services.channels import ChannelPool
from services.clock import SystemClock
from services.domain.mesh_view import MeshView
from services.runtime import Chassis
from services.settings import SettingsError
from services.state import MeshFeed, TraceStore, WorkloadStore

_log = logging.getLogger(__name__)

CHANNEL_SWEEP_S = 5.0


async def compose(chassis: Chassis) -> None:
    """Follow the mesh and serve it. SettingsError for an HTTP port that is taken."""
    options, tracer, stack = chassis.mesh.router, chassis.telemetry.tracer, chassis.stack
    view = MeshView()
    peers = Peers(view, options.suspect_s)
    channels = await stack.enter_async_context(ChannelPool())
    await stack.enter_async_context(MeshFeed(chassis.redis, chassis.keys, view, on_change=peers.view_changed))
    gate = Gate(options.max_active, options.max_waiting)
    stats = RouterStats(chassis.telemetry.meter, view)
    judge = JudgeClient(channels, peers, tracer, options.judge_timeout_s)
    sessions = await stack.enter_async_context(SessionPool(channels))
    workers = WorkerClient(channels, sessions, options.worker_silence_s)
    stages = chassis.mesh.stages
    agent = MoveAgent(
        view,
        BidClient(channels),
        tracer,
        chassis.telemetry.meter,
        BidLimits(stages.bid_timeout_s, stages.turn_timeout_s),
    )
    tiers = TierGeneration(peers, workers, agent, tracer, Patience(options.tier_wait_s, options.max_attempts))
    sampler, replan = None, chassis.mesh.planner.replan
    if replan.enabled:
        sampler = WindowSampler(replan.sample, replan.window_s, SystemClock(), random.Random())
        await stack.enter_async_context(WorkloadReporter(sampler, WorkloadStore(chassis.redis, chassis.keys)))
    driver = RequestDriver(view, gate, tiers, judge, stats, tracer, sampler)
    draining = Draining()
    router_pb2_grpc.add_RouterServiceServicer_to_server(
        RouterServicer(driver, view, draining, options.default_deadline_s), chassis.server
    )
    status = MeshStatus(chassis.instance_id, peers, gate, stats, agent)
    router_pb2_grpc.add_MeshServiceServicer_to_server(
        MeshServicer(status, TraceStore(chassis.redis, chassis.keys), tiers, view), chassis.server
    )
    chassis.health.offer(ROUTER_SERVICE, MESH_SERVICE)
    gateway = OpenAiGateway(driver, view, draining, tracer, options.default_deadline_s)
    try:
        port = await gateway.start(chassis.settings.bind_host, chassis.settings.http_port)
    except OSError as error:
        raise SettingsError(f"http_port: cannot listen on {chassis.settings.http_port}: {error.strerror}") from error
    stack.push_async_callback(gateway.close)
    chassis.http_address = f"{chassis.host}:{port}"
    _log.info("OpenAI-compatible API at http://%s/v1", chassis.http_address)
    chassis.on_drain.append(draining.drained)
    sweep = asyncio.create_task(_sweep(channels, view))
    stack.callback(sweep.cancel)


async def _sweep(channels: ChannelPool, view: MeshView) -> None:
    """Close channels to instances that have long gone."""
    before: set[str] = set()
    while True:
        await asyncio.sleep(CHANNEL_SWEEP_S)
        known = {record.address for record in view.instances()}
        await channels.keep(known | before)
        before = known
