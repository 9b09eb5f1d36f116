"""Composes the router: state feed, instance pool, request driver, gRPC and HTTP APIs."""

import asyncio
import functools
import logging
import random
from typing import NoReturn

from penstock.proto.router.v1 import router_pb2_grpc
from penstock.router_service.admission.admission_queue import AdmissionQueue
from penstock.router_service.answer_batching import AnswerBatching
from penstock.router_service.clients.judge_client import JudgeClient
from penstock.router_service.clients.reply_multiplexer import MultiplexerPool
from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.generation.cascade_generation import CascadeGeneration
from penstock.router_service.generation.in_flight_requests import InFlightRequests
from penstock.router_service.generation.request_driver import RequestDriver
from penstock.router_service.generation.tier_generation import TierGeneration
from penstock.router_service.migration.bidding import MoveAgent
from penstock.router_service.openai_gateway.app import OpenAiGateway
from penstock.router_service.request_intake import RequestIntake
from penstock.router_service.routing.health_probes import HealthProbes
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.router_service.routing.readiness import readiness
from penstock.router_service.routing.waiting_price import WaitingPrice
from penstock.router_service.servicer import MESH_SERVICE, ROUTER_SERVICE, MeshServicer, RouterServicer, move_reply
from penstock.router_service.siblings.client import Siblings
from penstock.router_service.siblings.servicer import RouterProcessServicer, start_server
from penstock.router_service.status import StatusReader
from penstock.router_service.telemetry.late_traces import LateTraces
from penstock.router_service.telemetry.recorders import PromptSampler, RequestRecorder
from penstock.router_service.telemetry.sampling import WindowSampler, WorkloadReporter
from penstock.router_service.telemetry.stats import RouterStats
from penstock.router_service.tenancy.key_follower import KeyFollower
from penstock.router_service.tenancy.tenancy import Tenancy
from penstock.services.acceptance.pipeline import predicting
from penstock.services.acceptance.wait_price import Price
from penstock.services.channels import ChannelPool
from penstock.services.clock import SystemClock
from penstock.services.domain.instances import Load, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.score_prediction import PredictorError, ScorePredictor
from penstock.services.field_problems import SettingsError
from penstock.services.health import Health
from penstock.services.runtime import Chassis
from penstock.services.score_predictor_file import read_score_predictor
from penstock.services.state.connection import StateUnavailable
from penstock.services.state.feed import MeshFeed
from penstock.services.state.limits import SharedLimits
from penstock.services.state.prompt_samples import PromptSampleStore
from penstock.services.state.served_requests import ServedRequestStore
from penstock.services.state.traces import TraceStore
from penstock.services.state.usage import UsageStore
from penstock.services.state.workload import WorkloadStore
from penstock.services.telemetry import observe_unusable_entries

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
        chassis.redis, chassis.keys, view, interval_s=chassis.settings.pull_interval_s, on_change=pool.view_changed
    )
    await stack.enter_async_context(feed)
    observe_unusable_entries(chassis.telemetry.meter, lambda: feed.unusable_entries)
    queue = AdmissionQueue(options.max_active, options.max_waiting)
    stats = RouterStats(chassis.telemetry.meter, view)
    judge = JudgeClient(channels, pool, tracer, chassis.telemetry.meter, options)
    sessions = await stack.enter_async_context(MultiplexerPool(channels))
    workers = WorkerClient(channels, sessions, options.worker_silence_s)
    agent = MoveAgent(view, workers, tracer, chassis.telemetry.meter, chassis.mesh.stages)
    slo = chassis.mesh.slo
    tiers = TierGeneration(pool, workers, agent, tracer, options, chassis.telemetry.meter, slo)
    late_traces = LateTraces(tracer, chassis.telemetry.keeps_trace, options.trace_slow_s)
    tenancy = await stack.enter_async_context(await _tenancy(chassis))
    if tenancy.needs_keys:
        chassis.interceptor.guard.authenticate = tenancy.authenticate
    undrafted = frozenset(tier.name for tier in chassis.mesh.tiers if not tier.escalation_drafts)
    chassis.load = lambda: Load(awaited=pool.queue.deserted())
    cascade = CascadeGeneration(
        view,
        tiers,
        judge,
        tracer,
        flag_below=options.flag_below,
        undrafted=undrafted,
        predictor=_predictor(chassis),
        waiting=WaitingPrice(Price(options.waiting_price, options.waiting_points), pool.delay_s)
        if options.waiting_price
        else None,
    )
    driver = RequestDriver(cascade, queue, stats, late_traces)
    if (replan := chassis.mesh.planner.replan).enabled:
        sampler = WindowSampler(replan.sample, replan.window_s, SystemClock(), random.Random())
        await stack.enter_async_context(WorkloadReporter(sampler, WorkloadStore(chassis.redis, chassis.keys)))
        driver.arrived = sampler.arrived
        driver.recorders.append(sampler.finished)
    served = sampled_prompts = None
    if options.kept_requests:
        served = ServedRequestStore(chassis.redis, chassis.keys, options.kept_requests)
        recorder = await stack.enter_async_context(RequestRecorder(served, SystemClock()))
        driver.recorders.append(recorder.finished)
    if options.sample_prompts.share:
        sampled_prompts = _prompt_samples(chassis)
        prompts = PromptSampler(sampled_prompts, options.sample_prompts.share, random.Random())
        await stack.enter_async_context(prompts)
        driver.recorders.append(prompts.finished)
    else:
        await _delete_prompts(chassis)
    chassis.interceptor.refuse_early(f"/{ROUTER_SERVICE}/Generate", driver.refusal)
    in_flight = InFlightRequests()
    intake = RequestIntake(driver, tenancy, view, in_flight, AnswerBatching(), options, slo)
    router_pb2_grpc.add_RouterServiceServicer_to_server(RouterServicer(intake), chassis.server)
    siblings = None
    if chassis.slot is not None:
        siblings = await stack.enter_async_context(Siblings(chassis.slot))
    status = StatusReader(chassis.instance_id, pool, queue, stats, agent, judge, siblings)
    move = functools.partial(move_reply, tiers, view)
    if chassis.slot is not None:
        server = await start_server(chassis.slot, RouterProcessServicer(status.counters, move))
        stack.push_async_callback(server.stop, 0)
    traces, usage = TraceStore(chassis.redis, chassis.keys), UsageStore(chassis.redis, chassis.keys)
    mesh_servicer = MeshServicer(status, traces, usage, move, siblings, served, sampled_prompts)
    router_pb2_grpc.add_MeshServiceServicer_to_server(mesh_servicer, chassis.admin)
    chassis.health.offer(ROUTER_SERVICE, MESH_SERVICE)
    gateway = OpenAiGateway(intake, chassis.telemetry, workers)
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
    chassis.http_address = f"{chassis.settings.reachable_host}:{port}"
    scheme = "http" if chassis.client_certificates is None else "https"
    _log.info("OpenAI-compatible API at %s://%s/v1", scheme, chassis.http_address)
    chassis.on_drain.append(in_flight.drained)
    await chassis.health.set_ready(ROUTER_SERVICE, False)  # until there is a plan
    chassis.supervise("readiness", lambda: _report_readiness(chassis.health, pool, in_flight))
    chassis.supervise("channel-sweep", lambda: _sweep(channels, view, sessions))
    probes = HealthProbes(pool, channels)
    chassis.supervise("address-probe", probes.check_new)
    chassis.supervise("lease-probe", probes.check_expired)


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
        for field in predicting(tier):
            if tier.name not in predictor.tiers:
                raise SettingsError(f"tiers[{i}].{field}: {path} predicts no scores of tier {tier.name}")
        if tier.skip_for is not None and tier.skip_for.tier not in predictor.tiers:
            raise SettingsError(f"tiers[{i}].skip_for: {path} predicts no scores of tier {tier.skip_for.tier}")
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
    prices = {tier.name: (tier.prompt_price, tier.output_price) for tier in chassis.mesh.tiers}
    shared = SharedLimits(chassis.redis, chassis.keys, chassis.instance_id)
    store = UsageStore(chassis.redis, chassis.keys)
    return Tenancy(access.tenants, keys, shared, store, chassis.telemetry.meter, prices)


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
