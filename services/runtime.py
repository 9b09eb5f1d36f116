"""run_service(): the main function of every service: settings, telemetry, server, drain."""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from grpc import aio
from redis.asyncio import Redis

from penstock.services import grpc_server, open_files, telemetry
from penstock.services.access.certificates import CertificateFiles, server_credentials
from penstock.services.access.guard import CallGuard
from penstock.services.access.listening import restricted
from penstock.services.access.roles import Listener
from penstock.services.background import EndProcess, end, supervise
from penstock.services.channels import server_options
from penstock.services.domain.instances import LOADING, InstanceRecord, Load, ModelCard, Role
from penstock.services.field_problems import SettingsError
from penstock.services.health import Health
from penstock.services.interceptors import ChassisInterceptor
from penstock.services.loading import LoadingProgress
from penstock.services.mesh_file import load_mesh_file
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.process_heartbeat import send_heartbeats
from penstock.services.process_slot import ProcessSlot
from penstock.services.processes import exits_on_unusable_settings
from penstock.services.settings import ServiceSettings
from penstock.services.state.connection import StateUnavailable, connect, server_problem
from penstock.services.state.keys import Keys
from penstock.services.state.registry import Registrar
from penstock.services.telemetry import Telemetry
from penstock.services.trace_sampling import SamplingLimits
from penstock.types.mesh_status import StagePlace

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LOADING_LEASES = 5.0
"""Leases that a worker that loads has at once."""
REDIS_LOOK_S = 1.0
UNDO_S = 15.0
"""Time for a cancelled `compose` to clean up, such as to stop a server that it started. Then it is cancelled again."""


@dataclass(slots=True)
class Chassis:
    """The environment of a service, which its `compose` extends.

    stack: contexts that are exited, in reverse order, after the server has stopped.
    load, place: called for every publication of the instance's record.
    on_drain: awaited in order after new requests have stopped; each should return when running work has finished.
    """

    role: Role
    settings: ServiceSettings
    mesh: MeshFile
    instance_id: str
    address: str
    redis: Redis
    keys: Keys
    telemetry: Telemetry
    server: aio.Server
    admin: aio.Server
    """The server of the administrative listener."""
    admin_address: str
    interceptor: ChassisInterceptor
    """Of `server`."""
    certificates: CertificateFiles | None
    """Of this service's role; None without TLS."""
    client_certificates: CertificateFiles | None
    """What the callers of `server` see."""
    health: Health
    stack: AsyncExitStack
    slot: ProcessSlot | None = None
    """Set if this is one of several processes of one service."""
    http_address: str = ""
    model: ModelCard | None = None
    load: Callable[[], Load] | None = None
    place: Callable[[], StagePlace | None] = lambda: None
    on_drain: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    announce_drain: Callable[[bool], None] = lambda _: None
    """Announces to the mesh whether this instance is draining, that is, accepts no new requests."""
    loading: LoadingProgress = field(default_factory=LoadingProgress)
    """How far a worker's model is loaded, which `compose` tells."""
    fatal: "asyncio.Future[BaseException]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, error: BaseException) -> None:
        """End the process with exit status 1. The first error is the one reported."""
        if not self.fatal.done():
            self.fatal.set_result(error)

    def watch(self, failure: Awaitable[BaseException]) -> None:
        """End the process with exit status 1 when `failure` returns an error."""

        async def wait() -> None:
            self.fail(await failure)

        self.stack.push_async_callback(end, supervise("failure-watch", wait, EndProcess(self.fail), endless=False))

    def supervise(self, name: str, factory: Callable[[], Coroutine[Any, Any, object]], *, endless: bool = True) -> None:
        """Run `factory()` in the background until the service stops; see `background.supervise`."""
        self.stack.push_async_callback(end, supervise(name, factory, endless=endless))


ROUTER_THRESHOLDS = (10_000, 2, 3)
"""New objects of a router until a garbage collection of those, and how many of those until one of the older and of all
(Python's default: 700, 10, 10). Most objects of a request are gone before a collection would look at them. Where clients send
what is refused, errors are in cycles: with 20,000 and Python's rounds one pass over them takes 0.2 s."""
ENTRIES = (Role.ROUTER, Role.PLANNER)
"""Services that clients call. The others trace what their callers do."""


class ServiceFailed(Exception):
    """A part that the service needs has failed for good."""


Compose = Callable[[Chassis], Coroutine[None, None, None]]


def run_service(role: Role, compose: Compose, slot: ProcessSlot | None = None) -> None:
    """Run a service until SIGTERM or SIGINT. The exit status is 2 for bad settings.

    slot: runs it as one of several processes of a router.
    """
    with exits_on_unusable_settings(role.value):
        settings = ServiceSettings.load()
        telemetry.set_up_logging(role.value if slot is None else f"{role.value}.{slot.index}", settings)
        mesh = load_mesh_file(settings.mesh_file)
        open_files.raise_limit()
        try:
            asyncio.run(_serve_process(role, settings, mesh, compose, slot))
        except ServiceFailed as error:
            _log.critical("%s", error)
            sys.exit(1)


async def _serve_process(
    role: Role, settings: ServiceSettings, mesh: MeshFile, compose: Compose, slot: ProcessSlot | None
) -> None:
    ready = functools.partial(_tune_garbage_collection, role)
    if not await serve(role, settings, mesh, compose, ready=ready, slot=slot):
        # A thread that loads a model cannot be interrupted, and Python would wait for it: minutes, for a large model.
        logging.shutdown()
        os._exit(0)


def _tune_garbage_collection(role: Role, _: Chassis) -> None:
    """Exclude the objects loaded so far from garbage collection, whose full passes would take 0.05 to 0.2 s each.

    A router collects less often: it keeps hundreds of requests with some hundred objects each, almost none of them in cycles,
    and passes over them took 6 to 8 % of its CPU time. Other services may have large tensors in cycles.
    """
    gc.collect()
    gc.freeze()
    if role is Role.ROUTER:
        gc.set_threshold(*ROUTER_THRESHOLDS)


async def serve(
    role: Role,
    settings: ServiceSettings,
    mesh: MeshFile,
    compose: Compose,
    *,
    ready: Callable[[Chassis], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    slot: ProcessSlot | None = None,
) -> bool:
    """Serve until `stop` is set or, without it, until a signal. `ready` is called once the instance is registered.

    slot: set for one of several processes that share their ports. When it drains it stops listening at once, so that new
        connections go to the others.

    Returns:
        Whether it has served: False if it was stopped while it started.
    """
    settings = restricted(settings, mesh, role)
    if slot is not None:
        mesh = mesh.router_share(slot.index, slot.count)
    keys = Keys(mesh.name)
    state_url = settings.state_url(mesh)
    instance_id = settings.instance_id or telemetry.make_instance_id(role.value, settings.tier)
    stop = stop or _stop_on_signals()
    async with AsyncExitStack() as stack:
        if slot is not None:
            stack.push_async_callback(end, supervise("process-heartbeat", functools.partial(send_heartbeats, slot)))
        measured = telemetry.set_up(
            role.value,
            instance_id,
            settings,
            state_url=state_url,
            keys=keys,
            metrics_host=LOOPBACK if slot is not None else "",
            sampling=SamplingLimits(mesh.router.trace_share, mesh.router.trace_per_s) if role in ENTRIES else None,
        )
        stack.callback(measured.close)
        folder = settings.certificate_folder(mesh)
        certificates = CertificateFiles.of_role(folder, role.value) if folder is not None else None
        internal = role is not Role.ROUTER
        shown = certificates if internal else _client_certificates(settings, mesh) or certificates
        guard = CallGuard(
            Listener.INTERNAL if internal else Listener.CLIENT, certificates=internal and certificates is not None
        )
        admin_guard = CallGuard(Listener.ADMIN, certificates=certificates is not None)
        interceptor, admin_interceptor = (
            ChassisInterceptor(measured, mesh.router.write_timeout_s, each) for each in (guard, admin_guard)
        )
        limits = () if internal else grpc_server.client_limits(mesh.router)
        options = server_options(role, shared_port=slot is not None)
        server = grpc_server.server((interceptor,), (*options, *limits))
        admin = grpc_server.server((admin_interceptor,), options)
        service_port = _Port(server, "grpc_port", settings.bind_host, settings.grpc_port, shown, mutual=internal)
        admin_port = _Port(admin, "admin_port", settings.admin_host, settings.admin_port, certificates)
        if slot is None:
            service_port.listen()
            admin_port.listen()
        redis = connect(state_url)
        stack.push_async_callback(redis.aclose)
        chassis = Chassis(
            role=role,
            settings=settings,
            mesh=mesh,
            instance_id=instance_id,
            address=f"{settings.reachable_host}:{service_port.number}",
            redis=redis,
            keys=keys,
            telemetry=measured,
            server=server,
            admin=admin,
            admin_address=f"{settings.reachable_admin_host}:{admin_port.number}",
            interceptor=interceptor,
            certificates=certificates,
            client_certificates=shown,
            health=Health(server, instance_id, admin=admin),
            stack=stack,
            slot=slot,
        )
        chassis.supervise("redis-version", functools.partial(_check_server, chassis, state_url), endless=False)
        record = InstanceRecord(
            instance_id=instance_id,
            role=role,
            address=chassis.address,
            admin_address=chassis.admin_address,
            epoch=time.time(),
            sequence=0,
            lease_s=settings.lease_s,
        )
        before = await stack.enter_async_context(AsyncExitStack())
        if role is Role.WORKER and settings.tier:
            await before.enter_async_context(_loading(chassis, record))
        if not await _completed(compose(chassis), stop):
            _log.info("stopped before it served")
            return False
        if slot is not None:  # not before: the kernel gives connections to every process that listens
            service_port.listen()
            admin_port.listen()
        for each in (server, admin):
            await each.start()
            stack.push_async_callback(each.stop, 0)
        await chassis.health.set_serving(True)  # before the others know it: routers ask for it at once
        registrar = await stack.enter_async_context(
            Registrar(
                redis,
                keys,
                replace(
                    record,
                    metrics_address=slot.metrics_address if slot is not None else measured.metrics_address,
                    http_address=chassis.http_address,
                    model=chassis.model,
                    group_id=slot.group_id if slot is not None else "",
                ),
                interval_s=settings.publish_interval_s,
                load=chassis.load,
                place=chassis.place,
                on_link=chassis.health.set_state_link,
            )
        )
        telemetry.observe_state_link(measured.meter, lambda: registrar.connected)
        chassis.announce_drain = registrar.drain
        await _first(chassis.fatal, registrar.published.wait(), stop.wait())
        await before.aclose()
        bound = f"{settings.bind_host}:{service_port.number}"
        others = "" if bound == chassis.address else f" and is announced as {chassis.address}"
        _log.info("%s listens on %s%s", instance_id, bound, others)
        ready(chassis)
        await _first(chassis.fatal, stop.wait())
        if chassis.fatal.done():
            raise ServiceFailed(f"{instance_id}: {chassis.fatal.result()!r}")
        _log.info("draining")
        registrar.drain()
        await chassis.health.enter_graceful_shutdown()
        if slot is not None:
            for each in (server, admin):
                closing = supervise("close-listener", functools.partial(each.stop, settings.drain_s), endless=False)
                stack.push_async_callback(end, closing)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_s):
                for drained in chassis.on_drain:
                    await drained()
        await asyncio.gather(server.stop(1.0), admin.stop(1.0))
    _log.info("stopped")
    return True


async def _check_server(chassis: Chassis, url: str) -> None:
    """End the process if its Redis, once there is one, is too old."""
    while True:
        try:
            problem = await server_problem(url)
        except StateUnavailable:
            await asyncio.sleep(REDIS_LOOK_S)
            continue
        if problem:
            chassis.fail(SettingsError(f"redis_url: {problem}"))
        return


def _loading(chassis: Chassis, record: InstanceRecord) -> Registrar:
    """Tells the mesh, under a name of its own, that a worker loads. Its lease is long: loading may hold the interpreter."""
    settings, name, lease_s = chassis.settings, f"{LOADING}{record.instance_id}", LOADING_LEASES * record.lease_s
    record = replace(record, instance_id=name, lease_s=lease_s, tier=settings.tier)
    interval_s = settings.publish_interval_s
    return Registrar(chassis.redis, chassis.keys, record, interval_s=interval_s, load=chassis.loading.load)


def _client_certificates(settings: ServiceSettings, mesh: MeshFile) -> CertificateFiles | None:
    """The certificate that clients of a router see, if it is not the router's own."""
    tls = mesh.tls
    if not tls.client_certificate:
        return None
    return CertificateFiles(settings.resolve(tls.client_certificate), key=settings.resolve(tls.client_key))


@dataclass(slots=True)
class _Port:
    """A port of a server. number: 0 until it listens, if any free port may be used."""

    server: aio.Server
    setting: str
    host: str
    number: int
    certificates: CertificateFiles | None
    mutual: bool = True
    """Whether callers need a certificate, too."""

    def listen(self) -> None:
        """Listen.

        Raises:
            SettingsError: The port is in use, or the host is not an address of this machine.
        """
        address = f"{self.host}:{self.number}"
        try:
            if self.certificates is None:
                self.number = self.server.add_insecure_port(address)
            else:
                credentials = server_credentials(self.certificates, mutual=self.mutual)
                self.number = self.server.add_secure_port(address, credentials)
        except RuntimeError:
            raise SettingsError(f"{self.setting}: cannot listen on {address}") from None


async def _completed(work: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Run `work` until `stop` is set, and cancel it then; return whether it completed. Raises what `work` raises."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        await task
        return True
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=UNDO_S)
        await end(task, stopped)


async def _first(fatal: "asyncio.Future[BaseException]", *waits: Coroutine[None, None, object]) -> None:
    """Wait until the first of these has finished."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    either: list[asyncio.Future[Any]] = [fatal, *tasks]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _stop_on_signals() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
