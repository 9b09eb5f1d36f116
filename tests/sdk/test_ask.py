"""`penstock ask` at a mesh that is full, or not there."""

import asyncio
import socket
import time

from typer.testing import CliRunner, Result

from penstock.cli.main import app
from services.domain.errors import Overloaded
from tests.support.router_servicers import TEXT, answer, failing, scripted


async def ask(target: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, ["ask", "-q", "-t", target, "hello"]))


async def test_a_full_mesh_is_waited_for() -> None:
    async with scripted(*[failing(Overloaded("512 requests are waiting already", 0.2))] * 3, answer) as router:
        done = await ask(router.address)
        assert (done.exit_code, done.stdout.strip()) == (0, TEXT)
        assert len(router.requests) == 4


async def test_a_mesh_that_is_not_there_is_said_in_one_line_and_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"127.0.0.1:{taken.getsockname()[1]}"
    began = time.monotonic()
    done = await ask(free)
    assert done.exit_code == 1
    assert "is the mesh up?" in done.output
    assert "Traceback" not in done.output
    assert time.monotonic() - began < 20
