"""Starts the mesh of a mesh file, waits until it is ready, keeps it running, and stops it cleanly.

A running mesh follows the plan: if a new revision changes the number of instances of a tier, workers are started, and surplus
workers are stopped once the new ones are ready and their own requests have finished.
"""

import asyncio
import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from penstock.local import redis_server, runfile
from penstock.local.runfile import FolderLock, ProcessId, RunFile
from penstock.local.start import Progress, needs_hub, start_timeout_s
from services.background import end, supervise
from services.domain.instances import InstanceRecord, Role
from services.domain.mesh_view import MeshView
from services.field_problems import SettingsError
from services.mesh_file import load_mesh_file
from services.mesh_rules import redis_url_problem
from services.mesh_schema import MeshFile
from services.processes import ProcessSpec, Watched, Watcher, free_port
from services.settings import ServiceSettings
from services.state import MeshFeed, connect
from services.state.connection import without_password
from services.state.keys import Keys
from services.state.users import OPERATOR

REDIS_TIMEOUT_S = 5.0  # for a configured Redis to respond at the start
PROGRESS_S = 5.0  # longest time between two reports of progress

_log = logging.getLogger(__name__)


class MeshFailed(Exception):
    """The mesh could not be started. The message includes the last lines of the log that shows the reason."""


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """Options of a local mesh.

    folder: for the logs, the data of Redis and the run file. workers: number of workers by tier, instead of the mesh file's.
    any_ports: routers use any free ports instead of the mesh file's.
    """

    mesh_file: Path
    folder: Path
    workers: dict[str, int] | None = None
    any_ports: bool = False
    log_level: str = "info"


async def _reach(url: str) -> None:
    """Return once the configured Redis responds.

    Raises:
        MeshFailed: It does not respond, or the URL is invalid. The message does not contain the password.
    """
    if problem := redis_url_problem(url):
        raise MeshFailed(f"redis_url: {problem}")
    parts = urlsplit(url)
    address = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
    client = connect(url)
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            while True:
                try:
                    await client.ping()
                    return
                except (RedisError, OSError):
                    await asyncio.sleep(0.2)
    except TimeoutError:
        raise MeshFailed(f"redis_url: no response from a Redis at {address} within {REDIS_TIMEOUT_S:g} s") from None
    finally:
        await client.aclose()


class LocalMesh(AbstractAsyncContextManager["LocalMesh"]):
    """A mesh that runs as long as the context lasts. Its folder is locked for that time.

    Raises:
        SettingsError: The mesh file or the options are bad.
        NoRedis: There is no redis-server to start.
        FolderInUse: Another mesh runs from the folder.
        MeshFailed: A process failed, or the mesh was not ready in time. All processes have been stopped.
    """

    def __init__(self, options: MeshOptions, on_progress: Callable[[Progress], None] = lambda _: None) -> None:
        self._options, self._on_progress = options, on_progress
        self.mesh: MeshFile = load_mesh_file(options.mesh_file)
        self._check_counts()
        self._router_processes = ServiceSettings.load().processes_of_router(self.mesh)
        self.watcher = Watcher()
        self.view = MeshView()
        self._stack = AsyncExitStack()
        self._offline_default = not needs_hub(self.mesh, options.mesh_file)
        self._followed_revision = 0
        self._followed_counts = {tier.name: tier.workers for tier in self.mesh.tiers}
        self.redis_url = ""
        """With the password of the user that follows the mesh, if this mesh has started its Redis."""
        self._redis_urls: dict[str, str] = {}

    async def __aenter__(self) -> "LocalMesh":
        await self._stack.__aenter__()
        folder = self._options.folder
        lock = FolderLock(folder)
        lock.acquire()
        self._stack.callback(lock.release)
        try:
            if (stale := runfile.stale_run_file(folder)) is not None:
                _log.warning("%s; replacing it", stale)
                runfile.remove(folder)
            self._stack.push_async_callback(self.watcher.stop_all)
            await self._start_redis()
            client = connect(self.redis_url)
            self._stack.push_async_callback(client.aclose)
            changed = asyncio.Event()
            await self._stack.enter_async_context(
                MeshFeed(client, Keys(self.mesh.name), self.view, on_change=changed.set)
            )
            for spec in self._service_specs():
                await self.watcher.start(spec)
            await self._until_ready(changed)
            self._write_run_file()
            self._stack.push_async_callback(end, supervise("follow-plan", lambda: self._follow(changed)))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        runfile.remove(self._options.folder)
        await self._stack.aclose()

    @property
    def grpc_addresses(self) -> tuple[str, ...]:
        """The routers' gRPC addresses. The processes of one router have the same."""
        return tuple(dict.fromkeys(record.address for record in self._routers()))

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """The routers' OpenAI-compatible APIs."""
        return tuple(dict.fromkeys(record.http_address for record in self._routers()))

    @property
    def admin_addresses(self) -> tuple[str, ...]:
        """The routers' administrative listeners, in the order of `grpc_addresses`."""
        return tuple(dict.fromkeys(record.admin_address for record in self._routers()))

    @property
    def planner_address(self) -> str:
        """The administrative listener of a planner; empty without one."""
        planners = self.view.instances(Role.PLANNER)
        return planners[0].admin_address if planners else ""

    def redis_url_of(self, role: str) -> str:
        """The URL of the Redis, with the password of a role (`router`, ...) if this mesh has started it."""
        return self._redis_urls.get(role, self.redis_url)

    @property
    def tls_folder(self) -> Path | None:
        """The folder of the mesh's certificates; None without TLS."""
        settings = ServiceSettings.load(mesh_file=self._options.mesh_file)
        folder = settings.certificate_folder(self.mesh)
        return folder.resolve() if folder is not None else None

    async def failed(self) -> str:
        """Wait until a process has failed for good; return the reason."""
        entry = await self._first(lambda watched: watched.fatal)
        return f"{entry.spec.name} cannot run:\n{entry.log_tail()}"

    async def _first(self, event: Callable[[Watched], asyncio.Event]) -> Watched:
        """Wait for the first process whose event is set."""
        waits = {asyncio.create_task(event(w).wait()): w for w in self.watcher.watched.values()}
        try:
            finished, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return waits[finished.pop()]

    def _routers(self) -> list[InstanceRecord]:
        return self.view.instances(Role.ROUTER)

    async def _start_redis(self) -> None:
        configured = os.environ.get("REDIS_URL", "") or self.mesh.redis_url
        if configured:
            await _reach(configured)
            self.redis_url = configured
            return
        port, binary = free_port(), redis_server.find()
        folder = self._options.folder
        passwords = redis_server.write_users(folder / "redis", self.mesh.name, binary)
        await self.watcher.start(redis_server.spec(folder / "redis", port, folder / "logs" / "redis.log", binary))
        self._redis_urls = {
            user: f"redis://{user}:{password}@127.0.0.1:{port}/0" for user, password in passwords.items()
        }
        self.redis_url = self._redis_urls[OPERATOR]

    def _service_specs(self) -> list[ProcessSpec]:
        mesh, specs = self.mesh, list[ProcessSpec]()
        for i in range(mesh.planner.replicas):
            specs.append(self._spec("planner_service", f"planner-{i}", 3, {}, mesh))
        for tier in mesh.tiers:
            for i in range(self._worker_count(tier.name, tier.workers)):
                specs.append(self._worker_spec(tier.name, f"worker-{tier.name}-{i}"))
        for i in range(mesh.judge.replicas):
            specs.append(
                self._spec("judge_service", f"judge-{i}", 2, {"OMP_NUM_THREADS": str(mesh.judge.threads)}, mesh)
            )
        for i in range(mesh.router.replicas):
            ports = {
                f"PENSTOCK_{kind}_PORT": str(port + i if port and not self._options.any_ports else 0)
                for kind, port in (
                    ("GRPC", mesh.router.grpc_port),
                    ("HTTP", mesh.router.http_port),
                    ("ADMIN", mesh.router.admin_port),
                )
            }
            specs.append(self._spec("router_service", f"router-{i}", 1, ports, mesh))
        return specs

    def _worker_spec(self, tier: str, name: str) -> ProcessSpec:
        threads = next(t.threads for t in self.mesh.tiers if t.name == tier)
        index = name.rpartition("-")[2]
        env = {"PENSTOCK_TIER": tier, "PENSTOCK_WORKER_INDEX": index, "OMP_NUM_THREADS": str(threads)}
        return self._spec("worker_service", name, 2, env, self.mesh)

    def _spec(self, module: str, name: str, stop_order: int, env: dict[str, str], mesh: MeshFile) -> ProcessSpec:
        common = {
            "PENSTOCK_MESH_FILE": str(self._options.mesh_file.resolve()),
            "PENSTOCK_REDIS_URL": self.redis_url_of(module.removesuffix("_service")),
            "PENSTOCK_LOG_LEVEL": self._options.log_level,
            "TOKENIZERS_PARALLELISM": "false",
        }
        if "HF_HUB_OFFLINE" not in os.environ and self._offline_default:
            common["HF_HUB_OFFLINE"] = "1"  # libraries query the hub even for local folders
        log = self._options.folder / "logs" / f"{name}.log"
        return ProcessSpec(
            name, [sys.executable, "-m", module], {**common, **env}, log, stop_order=stop_order, stop_s=35.0
        )

    def _check_counts(self) -> None:
        """Check the numbers of workers in the options.

        Raises:
            SettingsError: A tier is unknown, or its number exceeds `planner.max_instances`.
        """
        limit = self.mesh.planner.max_instances
        for name, count in (self._options.workers or {}).items():
            tier = self.mesh.tier(name)
            if count > max(limit, tier.workers):
                raise SettingsError(f"workers of tier {name}: at most {limit} (planner.max_instances), not {count}")

    def _worker_count(self, tier: str, usual: int) -> int:
        return (self._options.workers or {}).get(tier, usual)

    def progress(self) -> Progress:
        mesh = self.mesh
        routers = mesh.router.replicas * self._router_processes
        expected = {"router": routers, "planner": mesh.planner.replicas, "judge": mesh.judge.replicas}
        expected |= {f"worker {t.name}": self._worker_count(t.name, t.workers) for t in mesh.tiers}
        ready: Counter[str] = Counter()
        records = self.view.instances()
        for record in records:
            ready[f"worker {record.model.tier}" if record.model is not None else record.role.value] += 1
        if self.view.plan is None:
            expected["plan"] = 1
        ids = tuple(record.instance_id for record in records)
        return Progress(dict(ready), {kind: count for kind, count in expected.items() if count}, ids)

    async def _follow(self, changed: asyncio.Event) -> NoReturn:
        """Start and stop workers to match each new plan, forever.

        Only tiers whose number has changed are scaled. A plan that the planner computed applies to all tiers.
        """
        while True:
            plan = self.view.plan
            if plan is not None and plan.revision != self._followed_revision:
                self._followed_revision = plan.revision
                if plan.provenance.prediction is not None:
                    self._followed_counts = {tier: len(self._names(tier)) for tier in self._followed_counts}
            counts = {t.name: t.instances for t in plan.tiers} if plan is not None else {}
            changed_counts = {
                tier: counts[tier] for tier, count in self._followed_counts.items() if counts.get(tier, count) != count
            }
            if changed_counts:
                await self._scale(changed_counts, changed)
                self._followed_counts |= changed_counts  # only now, so that a failure is retried
                continue
            changed.clear()
            await changed.wait()

    async def _scale(self, counts: dict[str, int], changed: asyncio.Event) -> None:
        """Start missing workers of these tiers; when they are ready, stop the surplus ones."""
        running = {tier: self._names(tier) for tier in counts}
        for tier, count in counts.items():
            names = (f"worker-{tier}-{i}" for i in itertools.count())
            fresh = itertools.islice((n for n in names if n not in running[tier]), max(0, count - len(running[tier])))
            for name in fresh:
                _log.info("the plan has %d of %s: starting %s", count, tier, name)
                await self.watcher.start(self._worker_spec(tier, name))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while any(self._serving(tier) < count for tier, count in counts.items()):
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            _log.error("workers of the plan were not ready within %g s; the others keep running", self._start_timeout_s)
            return
        surplus = [name for tier, count in counts.items() for name in running[tier][count:]]
        for name in surplus:
            _log.info("the plan has fewer workers: stopping %s", name)
        await asyncio.gather(*(self.watcher.stop(name) for name in surplus))

    def _names(self, tier: str) -> list[str]:
        """The worker processes of a tier."""
        return [name for name in self.watcher.watched if _tier_of(name) == tier]

    @property
    def _start_timeout_s(self) -> float:
        return start_timeout_s(self.mesh, self._options.mesh_file)

    def _serving(self, tier: str) -> int:
        workers = self.view.instances(Role.WORKER)
        return sum(1 for record in workers if record.model is not None and record.model.tier == tier)

    async def _until_ready(self, changed: asyncio.Event) -> None:
        failed = asyncio.create_task(self._died())
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while True:
                    changed.clear()
                    progress = self.progress()
                    self._on_progress(progress)
                    if progress.complete:
                        return
                    news = asyncio.create_task(changed.wait())
                    await asyncio.wait({news, failed}, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
                    news.cancel()
                    if failed.done():
                        raise MeshFailed(failed.result())
        except TimeoutError:
            missing = ", ".join(f"{count} of {kind}" for kind, count in self.progress().missing.items())
            tails = "\n".join(f"{w.spec.name}:\n{w.log_tail()}" for w in self._absent())
            raise MeshFailed(f"not ready after {self._start_timeout_s:g} s: {missing} missing\n{tails}") from None
        finally:
            failed.cancel()

    async def _died(self) -> str:
        """Wait until any process has ended by itself while the mesh starts; return the reason."""
        entry = await self._first(lambda watched: watched.died)
        return f"{entry.spec.name} ended with status {entry.status} while the mesh started:\n{entry.log_tail()}"

    def _absent(self) -> list[Watched]:
        """Service processes that are not registered in the mesh."""
        present = {(record.group_id or record.instance_id).rpartition("-")[2] for record in self.view.instances()}
        return [w for name, w in self.watcher.watched.items() if name != "redis" and str(w.pid) not in present]

    def _write_run_file(self) -> None:
        process = ProcessId.of(os.getpid())
        assert process is not None
        RunFile(
            pid=process.pid,
            started=process.started,
            mesh_file=str(self._options.mesh_file.resolve()),
            redis_url=without_password(self.redis_url),
            grpc=self.grpc_addresses,
            http=self.http_addresses,
            admin=self.admin_addresses,
            planner=self.planner_address,
            tls_folder=str(self.tls_folder or ""),
        ).write(self._options.folder)


def _tier_of(process: str) -> str:
    """The tier of a process named `worker-<tier>-<number>`; empty for other processes."""
    kind, _, rest = process.partition("-")
    return rest.rpartition("-")[0] if kind == "worker" else ""
