"""Clients that do not read, or send slowly or not at all, hold nothing for long."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock import UnavailableError
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.proto.worker.v1 import worker_pb2, worker_pb2_grpc
from penstock.types.mesh_status import MeshStatus
from tests.conftest import MeshRunner
from tests.support.held_engine import held_engines
from tests.support.mesh import TestMesh
from tests.support.raw_http import connect, read_all, request_bytes
from tests.support.simulated_text import ENDLESS
from tests.support.waiting import until_answered

SHORT_S = 1.5  # each time-out that is tested: a process that gets no CPU for a while is not taken for one that is slow
ROOM = {"kv_tokens": 400_000, "max_context_tokens": 300_000}
FAST, SLOW = (
    {"overhead_ms": overhead_ms, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
    for overhead_ms in (0.1, 2.0)
)
TIERS = [
    {"name": "fast", "model": "sim-f", "threshold": 0, "simulated": FAST, **ROOM},  # for replies that are sent whole
    {"name": "large", "model": "sim-l", "simulated": SLOW, **ROOM},
]
MAX_TOKENS = 250_000  # far more than any socket buffer holds
TCP_ESTABLISHED = "01"  # in /proc/net/tcp
CLOSED_LOOKS = 10  # in a row at which a connection is not established
WHOLE_REPLY_TOKENS = 5000  # 7 MB: the kernel may buffer 4 MB
ENDLESS_REQUEST = pb.GenerateRequest(
    model="large",
    prompt=common_pb2.Prompt(text="endless"),
    sampling=common_pb2.SamplingParams(max_tokens=MAX_TOKENS, top_logprobs=20),
)
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]


@pytest.fixture
async def mesh(run_mesh: MeshRunner) -> AsyncIterator[TestMesh]:
    router = {
        "max_active": 4,
        "write_timeout_s": SHORT_S,
        "body_timeout_s": SHORT_S,
        "keepalive_timeout_s": SHORT_S,
        "connection_idle_s": SHORT_S,
        "max_connections": 5,
    }
    async with run_mesh(TIERS, router=router) as running:
        yield running


async def until(mesh: TestMesh, condition: Callable[[MeshStatus], bool]) -> None:
    """Wait until the router's status meets a condition.

    A test that was starved for SHORT_S has not read its watch of the status for that long: it begins another.
    """
    while True:
        with suppress(UnavailableError):
            return await mesh.until(condition)


async def idle(mesh: TestMesh) -> None:
    """Return once the request that has begun has ended, and nothing runs for it."""
    await until(mesh, lambda s: s.active == s.waiting == 0 and all(i.running == i.queued == 0 for i in s.instances))


async def read_to_the_end(call: Any) -> None:
    while (event := await call.read()) is not aio.EOF:
        finished = isinstance(event, pb.GenerateResponse) and event.HasField("finished")
        assert not finished, "the reply was short enough to be sent whole"


async def test_a_grpc_client_that_does_not_read_loses_its_request(mesh: TestMesh) -> None:
    """Flow control is shut; place and engine slot come free after the write time-out, and another request is served.

    When it reads again it gets what had been sent, and why there is no more.
    """
    async with aio.insecure_channel(mesh.router.address, SMALL_WINDOW) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        call = stub.Generate(ENDLESS_REQUEST, timeout=120)
        assert isinstance(await call.read(), pb.GenerateResponse)
        await idle(mesh)
        with pytest.raises(aio.AioRpcError) as failed:
            await read_to_the_end(call)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "not read" in (failed.value.details() or "")
    async with mesh.client() as client:
        assert (await client.generate("next", model="large", max_tokens=5)).text


@pytest.mark.parametrize("over_http", [False, True])
async def test_no_write_outlasts_the_deadline(run_mesh: MeshRunner, over_http: bool) -> None:
    """Also where the client has set none: the router's own holds, however long the write time-out is."""
    router = {"write_timeout_s": 1000, "default_deadline_s": SHORT_S}
    async with run_mesh(TIERS, router=router) as mesh, aio.insecure_channel(mesh.router.address) as channel:
        with closing(await connected(mesh)) as connection:
            if over_http:
                await asyncio.get_running_loop().sock_sendall(connection, post(ENDLESS_CHAT | {"stream": True}))
                await first_byte(connection)
            else:
                stub: Any = router_pb2_grpc.RouterServiceStub(channel)
                await stub.Generate(ENDLESS_REQUEST).read()
            await idle(mesh)


async def test_a_router_that_does_not_read_loses_its_call_to_a_worker(mesh: TestMesh) -> None:
    """Engine slots of all its replies there come free; it is told UNAVAILABLE, so its requests go on elsewhere."""
    async with aio.insecure_channel(mesh.parts["worker-large-0"].address, SMALL_WINDOW) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.GenerateMany(timeout=120)
        start = worker_pb2.StartReply(
            request=worker_pb2.GenerateRequest(
                request_id="of-a-stuck-router",
                prompt=common_pb2.Prompt(text="endless"),
                sampling=common_pb2.SamplingParams(max_tokens=MAX_TOKENS, top_logprobs=20, seed=1),
            )
        )
        await call.write(worker_pb2.GenerateManyRequest(steps=[worker_pb2.ReplyStep(reply_id=1, start=start)]))
        assert isinstance(await call.read(), worker_pb2.GenerateManyResponse)

        async def is_idle() -> bool:
            load = await stub.GetLoad(worker_pb2.GetLoadRequest())
            return not load.running_tokens and not load.queued_tokens

        await until_answered(is_idle)
        with pytest.raises(aio.AioRpcError) as failed:
            await read_to_the_end(call)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


async def connected(mesh: TestMesh) -> socket.socket:
    """A raw connection to the HTTP port, with a receive buffer that is soon full."""
    host, _, port = mesh.router.http_address.rpartition(":")
    return await connect((host, int(port)))


def post(body: dict[str, Any]) -> bytes:
    return request_bytes(json.dumps(body).encode())


async def server_closes(connection: socket.socket) -> None:
    """Return once the server has closed its end of a connection, which a client sees only if it reads."""
    looks = 0
    async with asyncio.timeout(60):
        while looks < CLOSED_LOOKS:
            looks = 0 if seems_open(connection) else looks + 1
            await asyncio.sleep(0.02)


def seems_open(connection: socket.socket) -> bool:
    """Whether the server's end is established by one look at the kernel's table, which can miss a row."""
    ends = [f":{port:04X}" for port in (connection.getpeername()[1], connection.getsockname()[1])]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return TCP_ESTABLISHED in [row[3] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])]


async def first_byte(connection: socket.socket) -> bytes:
    async with asyncio.timeout(60):
        return await asyncio.get_running_loop().sock_recv(connection, 1)


ENDLESS_CHAT = {
    "model": "large",
    "messages": [{"role": "user", "content": "endless"}],
    "max_tokens": MAX_TOKENS,
    "logprobs": True,
    "top_logprobs": 20,
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_an_http_client_that_does_not_read_loses_its_request(mesh: TestMesh, stream: bool) -> None:
    """Its connection is closed, streamed or not; place and engine slot come free, and another request is served."""
    body = ENDLESS_CHAT | {"stream": stream} | ({} if stream else {"model": "fast", "max_tokens": WHOLE_REPLY_TOKENS})
    with closing(await connected(mesh)) as connection:
        received = b""
        with held_engines():
            await asyncio.get_running_loop().sock_sendall(connection, post(body))
            if stream:
                received = await first_byte(connection)
            else:
                await until(mesh, lambda s: s.active == 1)
        await idle(mesh)
        await server_closes(connection)
        received += await read_all(connection)
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert b"[DONE]" not in received
        if not stream:
            head, _, content = received.partition(b"\r\n\r\n")
            length = next(int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
            assert len(content) < length
    async with mesh.client() as client:
        assert (await client.generate("next", model="large", max_tokens=5)).text


async def test_a_body_that_does_not_come_is_answered_with_408(mesh: TestMesh) -> None:
    """In OpenAI's shape; the connection is closed behind it."""
    with closing(await connected(mesh)) as connection:
        await asyncio.get_running_loop().sock_sendall(connection, post(ENDLESS_CHAT)[:-20])
        received = await read_all(connection)
    head, _, content = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert "body" in json.loads(content)["error"]["message"]


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_connection_without_a_whole_request_head_is_closed(mesh: TestMesh, begun: bytes) -> None:
    """Idle from the beginning, or headers that never end, also where a byte comes now and then."""
    loop = asyncio.get_running_loop()
    with closing(await connected(mesh)) as connection:
        await loop.sock_sendall(connection, begun)
        reading = asyncio.create_task(read_all(connection))
        while not reading.done() and begun:
            try:
                await loop.sock_sendall(connection, b"a")
            except OSError:
                break
            await asyncio.wait([reading], timeout=0.05)
        assert await reading == b""


async def test_a_connection_that_is_idle_after_a_request_is_closed(mesh: TestMesh) -> None:
    with closing(await connected(mesh)) as connection:
        await asyncio.get_running_loop().sock_sendall(connection, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await read_all(connection)).startswith(b"HTTP/1.1 200 OK")


async def test_an_idle_grpc_connection_is_closed_and_comes_back(mesh: TestMesh) -> None:
    async with aio.insecure_channel(mesh.router.address) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        await stub.ListModels(pb.ListModelsRequest())
        async with asyncio.timeout(60):
            while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
        assert (await stub.ListModels(pb.ListModelsRequest(), wait_for_ready=True)).models


async def test_http_connections_beyond_the_limit_are_closed(run_mesh: MeshRunner) -> None:
    """Before their request is read, and while the others are not idle for too long; when these have gone, one is served."""
    loop, head = asyncio.get_running_loop(), b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with run_mesh(TIERS, router={"max_connections": 5}) as mesh, asyncio.timeout(60):
        taken = [await connected(mesh) for _ in range(5)]
        with closing(await connected(mesh)) as over:
            with suppress(OSError):  # it may be closed by now
                await loop.sock_sendall(over, head)
            assert await read_all(over) == b""
        for connection in taken:
            connection.close()
        received = b""
        while not received.startswith(b"HTTP/1.1 200"):
            with closing(await connected(mesh)) as connection, suppress(OSError):
                await loop.sock_sendall(connection, head)
                received = await read_all(connection)


async def test_grpc_connections_beyond_the_limit_are_refused(mesh: TestMesh) -> None:
    """At most five, the fixture's own among them; when one has gone, a new one is served."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(mesh.router.address, options=options) for _ in range(6)]
    served, refused, codes = list[aio.Channel](), list[aio.Channel](), set[grpc.StatusCode]()
    for channel in channels:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        try:
            await stub.ListModels(pb.ListModelsRequest(), timeout=60)  # the channel keeps its connection
            served.append(channel)
        except aio.AioRpcError as error:
            codes.add(error.code())
            refused.append(channel)
    assert served
    assert codes == {grpc.StatusCode.UNAVAILABLE}
    for channel in served:
        await channel.close()
    again: Any = router_pb2_grpc.RouterServiceStub(refused[0])
    await again.ListModels(pb.ListModelsRequest(), timeout=60, wait_for_ready=True)
    for channel in refused:
        await channel.close()
