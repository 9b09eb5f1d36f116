"""A service that is told to end while it starts ends then, and not after it has loaded its model."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.services.domain.instances import Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.mesh_file import load_mesh_file
from penstock.services.runtime import Chassis, serve
from penstock.services.settings import ServiceSettings
from penstock.services.state.connection import connect
from penstock.services.state.feed import MeshFeed
from penstock.services.state.keys import Keys
from tests.conftest import ROOT, MeshFileMaker
from tests.support.services import RedisProcess

TIMEOUT_S = 120.0


async def test_a_stop_while_it_starts_undoes_what_was_begun(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """The composition is cancelled, what it entered is left, and the mesh never sees the instance."""
    steps, loading, stop = list[str](), asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def part() -> AsyncIterator[None]:
        steps.append("entered")
        yield
        steps.append("left")

    async def compose(chassis: Chassis) -> None:
        await chassis.stack.enter_async_context(part())
        loading.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)  # longer than `background.end` waits before it cancels once more
            steps.append("undone")

    file = mesh_file()
    settings, mesh = ServiceSettings.load(mesh_file=file, redis_url=redis.url), load_mesh_file(file)
    serving = asyncio.create_task(serve(Role.PLANNER, settings, mesh, compose, stop=stop))
    await loading.wait()
    stop.set()
    async with asyncio.timeout(TIMEOUT_S):
        assert await serving is False
    assert steps == ["entered", "undone", "left"]
    client, view = connect(redis.url), MeshView()
    async with MeshFeed(client, Keys(mesh.name), view) as feed:
        await feed.synced.wait()
        assert not view.instances()
    await client.aclose()


async def test_a_fault_while_it_starts_is_raised(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    async def compose(chassis: Chassis) -> None:
        raise LookupError("a bug")

    file = mesh_file()
    settings = ServiceSettings.load(mesh_file=file, redis_url=redis.url)
    with pytest.raises(LookupError, match="a bug"):
        await serve(Role.PLANNER, settings, load_mesh_file(file), compose, stop=asyncio.Event())


def test_a_process_does_not_wait_for_a_thread_that_loads_a_model(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """SIGTERM ends it with status 0, though the thread cannot be interrupted and runs on for minutes."""
    code = """
import asyncio, time
from penstock.services.domain.instances import Role
from penstock.services.runtime import run_service

def load():
    print("loading", flush=True)
    time.sleep(600)

async def compose(chassis):
    await asyncio.to_thread(load)

run_service(Role.WORKER, compose)
"""
    environment = {"PENSTOCK_MESH_FILE": str(mesh_file()), "PENSTOCK_REDIS_URL": redis.url}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
