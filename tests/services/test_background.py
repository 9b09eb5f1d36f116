"""No background task fails unseen: it is counted, logged, and started again, or the process ends with status 1."""

import ast
import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from penstock.services import background, processes, telemetry
from penstock.services.background import EndProcess, Restart, UnexpectedEnd, end, supervise
from penstock.services.channels import ChannelPool
from penstock.services.domain.instances import InstanceRecord, Load, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.processes import ProcessSpec, Watcher
from penstock.services.state.connection import connect_blocking
from penstock.services.state.feed import MeshFeed
from penstock.services.state.keys import Keys
from penstock.services.state.registry import Registrar
from tests.conftest import ROOT, MeshFileMaker
from tests.support.measured import metrics_page
from tests.support.mesh import COMPOSE
from tests.support.services import RedisProcess, serving
from tests.support.waiting import until

AT_ONCE = Restart(first_s=0.0)


class Once:
    """Raises at the first call, then calls on."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self.raised = call, False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.raised:
            self.raised = True
            raise RuntimeError("a bug")
        return self._call(*arguments, **options)


async def test_a_failed_task_is_counted_logged_with_its_traceback_and_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts, goes_on = 0, asyncio.Event()

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts <= 3:
            raise RuntimeError(f"bug {starts}")
        goes_on.set()
        await asyncio.Event().wait()

    task = supervise("test-restarted", work, AT_ONCE)
    await asyncio.wait_for(goes_on.wait(), 60)
    assert background.failures["test-restarted"] == 3
    errors = [record for record in caplog.records if record.name == "penstock.services.background"]
    assert [str(record.exc_info[1]) for record in errors if record.exc_info] == ["bug 1", "bug 2", "bug 3"]
    assert {record.levelno for record in errors} == {logging.ERROR}
    await end(task)
    assert background.failures["test-restarted"] == 3, "cancellation by the owner is a normal end"
    assert task.cancelled()


def test_pauses_double_up_to_a_limit() -> None:
    policy = Restart(first_s=0.5, most_s=3.0)
    assert [policy.pause_s(failed) for failed in (1, 2, 3, 4, 1000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


async def test_a_steady_task_begins_with_short_pauses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """steady_s=0: each run counts as steady; without that the third pause would be four times as long."""
    pauses: list[int] = []
    pause_s = Restart.pause_s

    def noted(policy: Restart, failed: int) -> float:
        pauses.append(failed)
        return pause_s(policy, failed)

    monkeypatch.setattr(Restart, "pause_s", noted)

    async def work() -> None:
        raise RuntimeError("bug")

    for policy, expected in ((Restart(0.0, steady_s=0.0), [1, 1, 1]), (Restart(0.0, steady_s=60.0), [1, 2, 3])):
        pauses.clear()
        task = supervise("test-steady", work, policy)
        await until(lambda: len(pauses) >= 3)
        await end(task)
        assert pauses[:3] == expected


async def test_an_endless_task_that_returns_has_failed_and_a_finite_one_has_not() -> None:
    returned = asyncio.Event()

    async def work() -> None:
        returned.set()

    await supervise("test-finite", work, endless=False)
    assert returned.is_set()
    assert "test-finite" not in background.failures
    errors: list[BaseException] = []
    await supervise("test-endless", work, EndProcess(errors.append))
    assert [type(error) for error in errors] == [UnexpectedEnd]
    assert background.failures["test-endless"] == 1


async def test_a_cancellation_from_within_is_a_failure() -> None:
    """A collaborator's cancelled future must not end the task as if its owner had."""
    errors: list[BaseException] = []

    async def work() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    await supervise("test-cancelled", work, EndProcess(errors.append))
    assert [type(error) for error in errors] == [UnexpectedEnd]


def test_a_task_that_the_service_cannot_do_without_ends_the_process_with_status_1(
    redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    code = """
from penstock.services.background import EndProcess, end, supervise
from penstock.services.domain.instances import Role
from penstock.services.runtime import run_service

async def broken():
    raise RuntimeError("a bug")

async def compose(chassis):
    chassis.stack.push_async_callback(end, supervise("broken", broken, EndProcess(chassis.fail)))

run_service(Role.PLANNER, compose)
"""
    environment = {"PENSTOCK_MESH_FILE": str(mesh_file()), "PENSTOCK_REDIS_URL": redis.url, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "background task broken failed" in ended.stderr
    assert "RuntimeError: a bug" in ended.stderr


async def test_the_feed_and_the_registrar_survive_a_fault_of_what_they_call(client: Redis, keys: Keys) -> None:
    """The view's listener fails once, and the load once: both tasks go on, and the record is seen."""
    view, listener, load = MeshView(), Once(lambda: None), Once(Load)
    before = background.failures.copy()
    record = InstanceRecord("j", Role.JUDGE, "h:1", 1.0, 0, 5.0)
    async with (
        MeshFeed(client, keys, view, interval_s=0.02, on_change=listener),
        Registrar(client, keys, record, interval_s=0.02, load=load),
    ):
        await until(lambda: bool(view.instances()) and view.connected)
    assert listener.raised
    assert load.raised
    assert (background.failures - before) == {"mesh-feed": 1, "registrar": 1}


async def test_the_sweep_survives_a_fault_and_metrics_tell_of_it(
    redis: RedisProcess, mesh_file: MeshFileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a whole router: the pool fails once, and is swept again; Prometheus shows the failure."""
    monkeypatch.setattr("penstock.router_service.compose.CHANNEL_SWEEP_S", 0.01)
    swept = 0
    keep = ChannelPool.keep

    async def kept(pool: ChannelPool, addresses: set[str]) -> None:
        nonlocal swept
        swept += 1
        if swept == 1:
            raise RuntimeError("a bug")
        await keep(pool, addresses)

    monkeypatch.setattr(ChannelPool, "keep", kept)
    before = background.failures["channel-sweep"]
    async with serving(Role.ROUTER, COMPOSE[Role.ROUTER], mesh_file(), redis.url) as router:
        await until(lambda: swept >= 3)
        assert background.failures["channel-sweep"] == before + 1
        text = await asyncio.to_thread(metrics_page, router.telemetry.metrics_address)
    assert re.search(
        r'^penstock_background_failures_total\{.*penstock_task="channel-sweep".*\} [1-9]', text, re.MULTILINE
    )


async def test_a_process_is_started_again_though_starting_it_failed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "RESTART", Restart(first_s=0.01))
    before = background.failures["process-watch"]
    watcher = Watcher()
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    entry = await watcher.start(ProcessSpec("sleeper", argv, {}, tmp_path / "log", 1, 5.0))
    first = entry.pid
    assert first is not None
    monkeypatch.setattr(asyncio, "create_subprocess_exec", Once(asyncio.create_subprocess_exec))
    os.kill(first, signal.SIGKILL)
    await until(lambda: entry.pid not in (None, first))
    assert background.failures["process-watch"] == before + 1
    await watcher.stop_all()


def test_spans_that_cannot_be_written_are_counted(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(telemetry, "write_spans", broken)
    before = background.failures["span-exporter"]
    tracers = TracerProvider()
    client = connect_blocking("redis://127.0.0.1:1/0")
    tracers.add_span_processor(SimpleSpanProcessor(telemetry._RedisSpanExporter(client, keys, "test", 5)))
    with tracers.get_tracer("t").start_as_current_span("s"):
        pass
    assert background.failures["span-exporter"] == before + 1


OWNED = {
    "services/background.py": "supervise itself",
    "services/grpc_server.py": "requests for calls: end with the server; a failure reaches its loop",
    "services/runtime.py": "waits of one function, cancelled before it returns",
    "penstock/cli/local.py": "waits of one function",
    "penstock/local/mesh.py": "waits of one function",
    "penstock/on_ray/placer.py": "reports of starts: kept until they end",
    "penstock/on_ray/server_parts.py": "waits of one function",
    "penstock/on_ray/supervisor.py": "reports to the controller: kept until they end",
    "penstock/placement/mesh.py": "waits of one function",
    "router_service/generation/attempt.py": "a move: ended with its reply",
    "worker_service/engine/remote/engine.py": "the opening of one response: awaited by its context",
    "router_service/routing/health_probes.py": "checks: ended with the group that all are in",
    "router_service/heartbeats.py": "the reader of one stream: ended with it",
    "router_service/migration/movable_reply.py": "a claim: ended with its reply",
    "router_service/clients/reply_multiplexer.py": "the reader of one call: its failure ends its replies; closed by the pool",
    "router_service/siblings/client.py": "calls of one move, ended with it; the last reading of counters, ended on closing",
    "router_service/openai_gateway/event_writer.py": "writes what a slow client has not read: ended with the response",
    "worker_service/engine/sglang/engine.py": "aborts: kept, logged, and awaited when the engine closes",
    "worker_service/engine/sglang/moves.py": "reads ahead for one move: awaited by it, ended with the engine",
    "worker_service/migration/receiver.py": "one transfer: ended with its call or the receiver",
    "worker_service/migration/sender.py": "one transfer: ended with its call or the sender",
    "worker_service/replies/reply_demultiplexer.py": "the replies of one call, or of one with one: ended with it",
}
PACKAGES = ("penstock", "services", "router_service", "worker_service", "planner_service", "judge_service")
CREATES = ("create_task", "ensure_future")


def test_tasks_are_created_by_supervise_or_by_an_owner_that_is_named_here() -> None:
    """A new place that creates tasks uses `supervise`, or says here who awaits them. No result is thrown away."""
    found: set[str] = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        if not any(text in source for text in (*CREATES, "supervise")):
            continue
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Call(func=ast.Attribute(attr=attribute)) if attribute in CREATES:
                    found.add(name)
                case ast.Expr(value=ast.Call(func=ast.Name(id="supervise"))):
                    pytest.fail(f"{name}:{node.lineno}: nobody ends this task")
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr=attribute))):
                    assert attribute not in CREATES, f"{name}:{node.lineno}: nobody owns this task"
                case ast.Attribute(
                    value=ast.Call(func=ast.Attribute(attr=attribute)), attr="cancel" | "add_done_callback"
                ):
                    assert attribute not in CREATES, f"{name}:{node.lineno}: nobody awaits this task"
    assert sorted(found - set(OWNED)) == [], "use `supervise`, or name the owner in OWNED"
