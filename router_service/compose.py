"""Composes the router: state feed, instance pool, request driver, gRPC and HTTP APIs."""

import asyncio
import functools
import logging
import random
from typing import NoReturn

from penstock.proto.router.v1 import router_pb2_grpc
from router_service.admission.admission_queue import AdmissionQueue
from router_service.answer_batching import AnswerBatching
from router_service.clients.bid_client import BidClient
from router_service.clients.judge_client import JudgeClient, JudgeLimits
from router_service.clients.reply_multiplexer import MultiplexerPool
from router_service.clients.token_client import TokenClient
from router_service.clients.worker_client import WorkerClient
from router_service.generation.early_rejection import EarlyCheckCounter
from router_service.generation.in_flight_requests import InFlightRequests
from router_service.generation.request_driver import RequestDriver
from router_service.generation.slo_hops import HopLimits
from router_service.generation.tier_generation import RetryPolicy, TierGeneration
from router_service.migration.bidding import BidLimits, MoveAgent
from router_service.openai_gateway import HttpLimits, OpenAiGateway
from router_service.routing.burst_steps import BurstSteps
from router_service.routing.instance_pool import InstancePool
from router_service.routing.lease_probe import LeaseProbe
from router_service.routing.readiness import readiness
from router_service.servicer import MESH_SERVICE, ROUTER_SERVICE, MeshServicer, RouterServicer, move_reply
from router_service.siblings.client import Siblings
from router_service.siblings.servicer import RouterProcessServicer, start_server
from router_service.status import MeshStatus
from router_service.telemetry.late_traces import LateTraces
from router_service.telemetry.prompt_sampler import PromptSampler
from router_service.telemetry.request_recorder import RequestRecorder
from router_service.telemetry.sampling import WindowSampler, WorkloadReporter
from router_service.telemetry.stats import RouterStats
from router_service.tenancy.key_follower import KeyFollower
from router_service.tenancy.tenancy import Tenancy
from services import open_files
from services.access.tenants import Tenant
from services.channels import ChannelPool
from services.clock import SystemClock
from services.domain.instances import Role
from services.domain.mesh_view import MeshView
from services.domain.score_prediction import PredictorError, ScorePredictor
from services.field_problems import SettingsError
from services.health import Health
from services.runtime import Chassis
from services.score_predictor_file import read_score_predictor
from services.state import (
    MeshFeed,
    PromptSampleStore,
    ServedRequestStore,
    StateUnavailable,
    TraceStore,
    WorkloadStore,
)
from services.state.limits import SharedLimits
from services.state.usage import UsageStore
from services.telemetry import observe_unusable_entries

_log = logging.getLogger(__name__)

CHANNEL_SWEEP_S = 5.0
READINESS_S = 1.0  # between two checks; also checked at every change of the view


async def compose(chassis: Chassis) -> None:
    """Follow the state of the mesh and serve requests.

    Raises:
        SettingsError: The HTTP port is taken.
    """
    options, tracer, stack = chassis.mesh.router, chassis.telemetry.tracer, chassis.stack
    view = MeshView(keep_expired={Role.WORKER, Role.JUDGE})
    pool = InstancePool(view, options.ejection_s)
    channels = await stack.enter_async_context(ChannelPool(chassis.certificates))
    feed = MeshFeed(
        chassis.redis,
        chassis.keys,
        view,
        interval_s=chassis.settings.pull_interval_s,
        on_change=pool.view_changed,
    )
    await stack.enter_async_context(feed)
    observe_unusable_entries(chassis.telemetry.meter, lambda: feed.unusable_entries)
    queue = AdmissionQueue(options.max_active, options.max_waiting)
    stats = RouterStats(chassis.telemetry.meter, view)
    judging = JudgeLimits(options.judge_timeout_s, options.judge_concurrency, options.judge_open_s)
    judge = JudgeClient(channels, pool, tracer, chassis.telemetry.meter, judging)
    sessions = await stack.enter_async_context(MultiplexerPool(channels))
    workers = WorkerClient(channels, sessions, options.worker_silence_s)
    stages = chassis.mesh.stages
    agent = MoveAgent(
        view,
        BidClient(channels),
        tracer,
        chassis.telemetry.meter,
        BidLimits(stages.bid_timeout_s, stages.turn_timeout_s),
    )
    policy = RetryPolicy(options.tier_wait_s, options.max_attempts, options.max_refusals, options.max_deaths)
    slo = chassis.mesh.slo
    hops = HopLimits(slo.max_hops, slo.hop_time_s)
    tiers = TierGeneration(pool, workers, agent, tracer, policy, chassis.telemetry.meter, hops)
    sampler, replan = None, chassis.mesh.planner.replan
    if replan.enabled:
        sampler = WindowSampler(replan.sample, replan.window_s, SystemClock(), random.Random())
        await stack.enter_async_context(WorkloadReporter(sampler, WorkloadStore(chassis.redis, chassis.keys)))
    recorder = served = None
    if options.kept_requests:
        served = ServedRequestStore(chassis.redis, chassis.keys, options.kept_requests)
        recorder = await stack.enter_async_context(RequestRecorder(served, SystemClock()))
    prompts = sampled_prompts = None
    if options.sample_prompts.share:
        sampled_prompts = _prompt_samples(chassis)
        prompts = await stack.enter_async_context(
            PromptSampler(sampled_prompts, options.sample_prompts.share, random.Random())
        )
    else:
        await _delete_prompts(chassis)
    late_traces = LateTraces(tracer, chassis.telemetry.keeps_trace, options.trace_slow_s)
    tenancy = await stack.enter_async_context(await _tenancy(chassis))
    if tenancy.needs_keys:
        chassis.guard.authenticate = tenancy.authenticate
    undrafted = frozenset(tier.name for tier in chassis.mesh.tiers if not tier.escalation_drafts)
    bursts = BurstSteps(view, chassis.instance_id, options.burst_window_s, chassis.telemetry.meter)
    chassis.load = bursts.load
    driver = RequestDriver(
        view,
        queue,
        tiers,
        judge,
        stats,
        tracer,
        late_traces,
        sampler,
        options.flag_below,
        undrafted,
        _predictor(chassis),
        EarlyCheckCounter(chassis.telemetry.meter),
        recorder,
        bursts,
        prompts,
    )
    chassis.interceptor.refuse_early(f"/{ROUTER_SERVICE}/Generate", driver.refusal)
    draining, batching = InFlightRequests(), AnswerBatching()
    router_pb2_grpc.add_RouterServiceServicer_to_server(
        RouterServicer(driver, tenancy, view, draining, batching, options.default_deadline_s, options.heartbeat_s, slo),
        chassis.server,
    )
    siblings = None
    if chassis.slot is not None:
        siblings = await stack.enter_async_context(Siblings(chassis.slot))
    status = MeshStatus(chassis.instance_id, pool, queue, stats, agent, bursts, siblings)
    move = functools.partial(move_reply, tiers, view)
    if chassis.slot is not None:
        server = await start_server(chassis.slot, RouterProcessServicer(status.counters, move))
        stack.push_async_callback(server.stop, 0)
    router_pb2_grpc.add_MeshServiceServicer_to_server(
        MeshServicer(
            status,
            TraceStore(chassis.redis, chassis.keys),
            UsageStore(chassis.redis, chassis.keys),
            move,
            siblings,
            served,
            sampled_prompts,
        ),
        chassis.admin,
    )
    chassis.health.offer(ROUTER_SERVICE, MESH_SERVICE)
    limits = HttpLimits(
        default_deadline_s=options.default_deadline_s,
        write_timeout_s=options.write_timeout_s,
        body_timeout_s=options.body_timeout_s,
        keepalive_timeout_s=options.keepalive_timeout_s,
        max_connections=open_files.connections(options.max_connections),
        heartbeat_s=options.heartbeat_s,
        cors_origins=options.cors_origins,
    )
    tokens = TokenClient(channels)
    gateway = OpenAiGateway(driver, tenancy, view, draining, batching, chassis.telemetry, limits, slo, tokens)
    if siblings is not None:
        await _wait_for_plan(pool, siblings)
        siblings.listening = True
        chassis.on_drain.append(functools.partial(_stop_listening, gateway, siblings))
    try:
        port = await gateway.start(
            chassis.settings.bind_host,
            chassis.settings.http_port,
            shared_port=chassis.slot is not None,
            certificates=chassis.client_certificates,
        )
    except OSError as error:
        raise SettingsError(f"http_port: cannot listen on {chassis.settings.http_port}: {error.strerror}") from error
    stack.push_async_callback(gateway.close)
    chassis.http_address = f"{chassis.host}:{port}"
    _log.info(
        "OpenAI-compatible API at %s://%s/v1",
        "http" if chassis.client_certificates is None else "https",
        chassis.http_address,
    )
    chassis.on_drain.append(draining.drained)
    await chassis.health.set_ready(ROUTER_SERVICE, False)  # until there is a plan
    chassis.supervise("readiness", lambda: _report_readiness(chassis.health, pool, draining))
    chassis.supervise("channel-sweep", lambda: _sweep(channels, view, sessions))
    chassis.supervise("lease-probe", LeaseProbe(pool, channels).run)


def _predictor(chassis: Chassis) -> ScorePredictor | None:
    """The score predictor of the mesh file, if it names one.

    Raises:
        SettingsError: The file is no score predictor, or not for the tiers of the mesh that need it.
    """
    path = chassis.mesh.router.score_predictor
    if not path:
        return None
    try:
        predictor = read_score_predictor(chassis.settings.resolve(path))
    except PredictorError as error:
        raise SettingsError(f"router.score_predictor: {error}") from None
    for i, tier in enumerate(chassis.mesh.tiers):
        if tier.skip_below is not None and tier.name not in predictor.tiers:
            raise SettingsError(f"tiers[{i}].skip_below: {path} predicts no scores of tier {tier.name}")
    return predictor


def _prompt_samples(chassis: Chassis) -> PromptSampleStore:
    limits = chassis.mesh.router.sample_prompts
    return PromptSampleStore(chassis.redis, chassis.keys, limits.max_prompts, limits.max_age_s)


async def _delete_prompts(chassis: Chassis) -> None:
    """Delete prompts that were sampled while the mesh file asked for it."""
    try:
        await _prompt_samples(chassis).delete()
    except StateUnavailable as error:
        _log.warning("sampled prompts, if there are any, could not be deleted: %s", error)


async def _tenancy(chassis: Chassis) -> Tenancy:
    """The tenants of the mesh file, and the keys of the key file, if there is one."""
    access, path = chassis.mesh.access, chassis.settings.key_file(chassis.mesh)
    keys = await chassis.stack.enter_async_context(KeyFollower(path)) if path is not None else None
    tenants = [Tenant(**tenant.model_dump()) for tenant in access.tenants]
    prices = {tier.name: (tier.prompt_price, tier.output_price) for tier in chassis.mesh.tiers}
    shared = SharedLimits(chassis.redis, chassis.keys, chassis.instance_id)
    store = UsageStore(chassis.redis, chassis.keys)
    return Tenancy(tenants, keys, shared, store, chassis.telemetry.meter, prices)


async def _wait_for_plan(pool: InstancePool, siblings: Siblings) -> None:
    """Return when there is a plan, or when none of the router's other processes serves.

    A process that has just started while Redis is unavailable must not get connections that the others can serve. Without
    others, it reports itself what is missing, on all APIs.
    """
    while pool.view.plan is None and await siblings.any_listens():
        await pool.change(READINESS_S)


async def _stop_listening(gateway: OpenAiGateway, siblings: Siblings) -> None:
    siblings.listening = False
    await gateway.stop_listening()


async def _report_readiness(health: Health, pool: InstancePool, draining: InFlightRequests) -> NoReturn:
    """Keep the gRPC health of the router's service the same as /readyz."""
    while True:
        await health.set_ready(ROUTER_SERVICE, not readiness(pool.view, draining=draining.closed).problem)
        await pool.change(READINESS_S)


async def _sweep(channels: ChannelPool, view: MeshView, sessions: MultiplexerPool) -> NoReturn:
    """Close channels to instances that left some time ago, except those with active replies."""
    before: set[str] = set()
    while True:
        await asyncio.sleep(CHANNEL_SWEEP_S)
        known = {record.address for record in (*view.instances(), *view.expired())}
        await channels.keep(known | before | sessions.in_use())
        before = known
