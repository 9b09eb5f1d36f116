"""A router of two real processes under `LocalMesh`: one killed, each restarted in turn, the parent killed, all drained.

The tests share one mesh and leave it as they found it, but for the last one.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import pytest
from grpc import aio

from penstock import AsyncClient, Tokens, UnavailableError
from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.services.health import is_serving
from penstock.services.processes import free_port
from tests.conftest import write_mesh_file
from tests.support.simulated_text import ENDLESS, simulated_texts
from tests.support.waiting import runs, until

pytestmark = pytest.mark.slow

SLOW = {"overhead_ms": 20.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
TOKENS = 100  # two seconds
CLIENTS = 8
TRIES = 5  # of kills that may come too late
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalMesh]:
    folder = tmp_path_factory.mktemp("processes")
    router = {"processes": 2, "trace_share": 1.0, "grpc_port": free_port(), "http_port": free_port()}
    tiers = [{"name": "only", "model": "sim", "simulated": SLOW, "max_running": 64}]
    file = write_mesh_file(folder, tiers, router=router, judge={"replicas": 0})
    async with LocalMesh(MeshOptions(file, folder)) as running:
        yield running


def address(mesh: LocalMesh) -> str:
    """The router's, also while no process of it is registered."""
    return f"127.0.0.1:{mesh.mesh.router.grpc_port}"


def parent(mesh: LocalMesh) -> int:
    pid = mesh.watcher.watched["router-0"].pid
    assert pid is not None
    return pid


def children(parent_pid: int) -> dict[int, int]:
    """Process ids of a router's processes, by index."""
    found: dict[int, int] = {}
    for line in Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text().split():
        command = Path(f"/proc/{line}/cmdline").read_bytes().decode()
        if '"index":' in command:
            found[int(command.partition('"index":')[2].partition(",")[0])] = int(line)
    return found


def folder_of(child: int) -> Path:
    """The folder of a process's group."""
    command = Path(f"/proc/{child}/cmdline").read_text()
    return Path(command.partition('"folder":"')[2].partition('"')[0])


def exists(folder: Path) -> bool:
    return folder.exists()


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


async def all_answer(mesh: LocalMesh) -> None:
    """Return once both processes do."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if mesh.addresses.admin:  # a router that starts again has another one
                async with AsyncClient(address(mesh), admin=mesh.addresses.admin) as client:
                    with suppress(UnavailableError):  # while none listens
                        if [process.answering for process in (await client.status()).processes] == [True, True]:
                            return
            await asyncio.sleep(0.1)


def client(mesh: LocalMesh, number: int) -> AsyncClient:
    """A client with a connection of its own: gRPC shares one among channels with the same options."""
    return AsyncClient(address(mesh), keepalive_s=60 + number, timeout_s=TIMEOUT_S)


async def read(source: AsyncClient, prompt: str, begun: asyncio.Event) -> str:
    text, tokens = "", 0
    async for event in source.stream(prompt, temperature=0, max_tokens=TOKENS):
        if isinstance(event, Tokens):
            assert event.offset == tokens
            text, tokens = text + event.text, tokens + len(event.token_ids)
            begun.set()
    assert tokens == TOKENS
    return text


async def channel_at(mesh: LocalMesh, index: int, stack: AsyncExitStack) -> aio.Channel:
    """A connection to the process with this index, until the stack is left."""
    router_id = next(r.group_id for r in mesh.view.instances() if r.group_id)
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            channel = aio.insecure_channel(address(mesh), [("grpc.use_local_subchannel_pool", 1)])
            if await is_serving(channel, f"{router_id}.{index}", TIMEOUT_S):
                return await stack.enter_async_context(channel)
            await channel.close()


async def raw(channel: aio.Channel, begun: asyncio.Event) -> bool:
    """Whether a stream that nobody resumes comes to its end."""
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=TOKENS)
    request = pb.GenerateRequest(model="only", prompt=common_pb2.Prompt(text="raw"), sampling=sampling)
    finished = False
    try:
        async for event in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
            if event.HasField("tokens"):
                begun.set()
            finished = finished or event.HasField("finished")
    except aio.AioRpcError:
        return False
    return finished


async def sse(mesh: LocalMesh, session: aiohttp.ClientSession, begun: asyncio.Event) -> bool:
    """Whether an HTTP stream comes to its end."""
    body = {"model": "only", "stream": True, "max_tokens": TOKENS, "messages": [{"role": "user", "content": "hello"}]}
    url = f"http://127.0.0.1:{mesh.mesh.router.http_port}/v1/chat/completions"
    lines = list[bytes]()
    async with session.post(url, json=body) as response:
        async for line in response.content:
            begun.set()
            lines.append(line.strip())
    return lines[-2:] == [b"data: [DONE]", b""]


async def test_the_mesh_has_one_router_at_one_address_with_two_processes(mesh: LocalMesh) -> None:
    assert mesh.addresses.grpc == (address(mesh),)
    assert len(mesh.addresses.http) == 1
    await all_answer(mesh)
    async with AsyncClient(address(mesh), admin=mesh.addresses.admin) as asked, aiohttp.ClientSession() as session:
        async with asyncio.timeout(60):  # the process that answers may not have heard of the other one yet
            async for status in asked.watch_status(0.1):
                if [i.processes for i in status.instances if i.role == "router"] == [2]:
                    break
        async with session.get(f"http://{mesh.addresses.http[0]}/readyz") as response:
            assert response.status == 200


async def test_traces_of_requests_to_any_process_are_found(mesh: LocalMesh) -> None:
    async with AsyncExitStack() as stack:
        traced = list[str]()
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=1)
        request = pb.GenerateRequest(model="only", prompt=common_pb2.Prompt(text="traced"), sampling=sampling)
        for index in range(2):
            channel = await channel_at(mesh, index, stack)
            async for event in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
                traced += [event.finished.trace_id] if event.HasField("finished") else []
        assert len(set(traced)) == 2
        async with AsyncClient(address(mesh), admin=mesh.addresses.admin) as asked, asyncio.timeout(TIMEOUT_S):
            for trace_id in traced:
                while trace_id not in {trace.trace_id for trace in await asked.traces(20)}:
                    await asyncio.sleep(0.1)


async def test_a_killed_process_loses_its_own_connections_alone_and_the_sdk_resumes(mesh: LocalMesh) -> None:
    undisturbed = simulated_texts({"hello": TOKENS})["hello"]
    for _ in range(TRIES):  # where this process gets no CPU, the replies may end before the kill
        await all_answer(mesh)
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(client(mesh, number)) for number in range(CLIENTS)]
            channels = [await channel_at(mesh, index, stack) for index in range(2)]
            begun = [asyncio.Event() for _ in range(CLIENTS + 2)]
            reading = [asyncio.create_task(read(c, "hello", b)) for c, b in zip(clients, begun, strict=False)]
            unresumed = [asyncio.create_task(raw(c, b)) for c, b in zip(channels, begun[CLIENTS:], strict=True)]
            await asyncio.gather(*(event.wait() for event in begun))
            in_time = not any(reply.done() for reply in unresumed)
            os.kill(children(parent(mesh))[0], signal.SIGKILL)
            assert await asyncio.gather(*reading) == [undisturbed] * CLIENTS
            ended = await asyncio.gather(*unresumed)
            assert ended[1]
            if in_time and not ended[0]:
                break
    else:
        pytest.fail("no kill came in the middle of a reply")
    await all_answer(mesh)


async def test_processes_restarted_one_after_the_other_refuse_nobody(mesh: LocalMesh) -> None:
    """SIGTERM to each in turn: it ends its streams, and whoever comes meanwhile comes to the other."""
    await all_answer(mesh)
    over = asyncio.Event()

    async def ask_again_and_again(number: int) -> int:
        asked = 0
        async with client(mesh, number) as source:
            while not over.is_set():
                assert (await source.generate("hello", max_tokens=5)).text
                asked += 1
        return asked

    asking = [asyncio.create_task(ask_again_and_again(number)) for number in range(CLIENTS)]
    for index in range(2):
        pid = children(parent(mesh))[index]
        os.kill(pid, signal.SIGTERM)
        while runs(pid):
            await asyncio.sleep(0.02)
        await all_answer(mesh)
    over.set()
    assert min(await asyncio.gather(*asking)) >= 1


async def test_a_killed_parents_processes_end_their_streams_and_a_new_one_takes_the_ports(mesh: LocalMesh) -> None:
    await all_answer(mesh)
    before, pid = children(parent(mesh)), parent(mesh)
    folder = folder_of(before[0])
    assert files(folder) >= {"0.sock", "1.sock"}
    async with client(mesh, 0) as source:
        begun = asyncio.Event()
        reading = asyncio.create_task(read(source, "hello", begun))
        await begun.wait()
        os.kill(pid, signal.SIGKILL)
        await reading
    await until(lambda: not any(runs(child) for child in before.values()))
    assert not exists(folder)
    await all_answer(mesh)
    assert parent(mesh) != pid
    assert not set(children(parent(mesh)).values()) & set(before.values())


async def test_a_stopped_router_drains_all_its_processes(mesh: LocalMesh) -> None:
    """The last test: the router is not started again."""
    await all_answer(mesh)
    pids = [parent(mesh), *children(parent(mesh)).values()]
    async with AsyncExitStack() as stack:
        channels = [await channel_at(mesh, index, stack) for index in range(2)]
        begun = [asyncio.Event() for _ in channels]
        streams = [asyncio.create_task(raw(c, b)) for c, b in zip(channels, begun, strict=True)]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        begun += [asyncio.Event() for _ in range(CLIENTS)]
        streams += [asyncio.create_task(sse(mesh, session, b)) for b in begun[len(channels) :]]
        await asyncio.gather(*(event.wait() for event in begun))
        await mesh.watcher.stop("router-0")
        assert await asyncio.gather(*streams) == [True] * len(streams)
    assert not any(runs(pid) for pid in pids)
