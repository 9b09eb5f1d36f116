"""`penstock ask` at a mesh that is full, not running, or gives an empty answer."""

import asyncio
import socket
from collections.abc import AsyncIterator

from typer.testing import CliRunner, Result

from penstock.cli.main import app
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.services.domain.errors import Overloaded
from penstock.services.grpc_types import Context
from tests.support.router_servicers import TEXT, accepted, answer, failing, scripted


async def ask(target: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, ["ask", "-q", "-t", target, "hello"]))


async def test_a_full_mesh_is_waited_for() -> None:
    async with scripted(*[failing(Overloaded("512 requests are waiting already", 0.2))] * 3, answer) as router:
        done = await ask(router.address)
        assert (done.exit_code, done.stdout.strip()) == (0, TEXT)
        assert len(router.requests) == 4


async def test_a_mesh_that_is_not_there_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"127.0.0.1:{taken.getsockname()[1]}"
    done = await ask(free)
    assert done.exit_code == 1
    assert "is the mesh running?" in done.output
    assert "Traceback" not in done.output


TRACE_ID = "0123456789abcdef" * 2


async def no_text(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
    yield accepted()
    finished = pb.Finished(
        tier="a-tier-with-a-rather-long-name", reason=common_pb2.FINISH_REASON_STOP, trace_id=TRACE_ID
    )
    yield pb.GenerateResponse(finished=finished)


async def test_an_empty_answer_is_named_and_the_trace_id_is_not_wrapped() -> None:
    async with scripted(no_text) as router:
        result = await asyncio.to_thread(
            lambda: CliRunner(env={"COLUMNS": "60"}).invoke(app, ["ask", "-t", router.address, "hello"])
        )
    lines = result.stdout.splitlines()
    assert lines[-2].strip() == "(the answer is empty)"
    assert lines[-1].endswith(f"trace {TRACE_ID}")
