"""The router's end of GenerateMany, against real workers."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.router_service.clients.reply_multiplexer import (
    MAX_JOINED_BYTES,
    MAX_STEP_BYTES,
    MultiplexerPool,
    ReplyMultiplexer,
)
from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.domain.failures import Failure, InstanceFailed
from penstock.services.channels import ChannelPool, server_options
from penstock.services.domain.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InvalidRequest,
    MessageTooLarge,
    Unavailable,
)
from penstock.services.domain.instances import Role
from penstock.services.processes import free_port
from penstock.services.runtime import Chassis
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import EngineFinished, WorkerEnd
from tests.conftest import MeshFileMaker
from tests.support.mesh import COMPOSE
from tests.support.services import RedisProcess, serving
from tests.support.token_events import called
from tests.support.waiting import until_answered


@dataclass
class Scene:
    channels: ChannelPool
    sessions: MultiplexerPool
    file: Path
    redis_url: str
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def worker(self) -> AbstractAsyncContextManager[Chassis]:
        compose = COMPOSE[Role.WORKER]
        return serving(Role.WORKER, compose, self.file, self.redis_url, tier="only", grpc_port=self.port, drain_s=0.0)

    def client(self, silence_s: float = 30.0) -> WorkerClient:
        return WorkerClient(self.channels, self.sessions, silence_s)

    def events(
        self, request: GenerationRequest, timeout_s: float = 60.0, silence_s: float = 30.0
    ) -> AsyncGenerator[Any, None]:
        """All that a reply passes on, its end included."""

        def start(call: Callable[[Any], None]) -> Coroutine[Any, Any, WorkerEnd]:
            return self.client(silence_s).generate(
                self.address, request, timeout_s=timeout_s, metadata=(), on_event=call, on_tokens=call
            )

        return called(start)

    async def reply(self, request: GenerationRequest, timeout_s: float = 60.0) -> tuple[list[int], EngineFinished]:
        tokens: list[int] = []
        async for event in self.events(request, timeout_s):
            if isinstance(event, TokenFrame):
                assert event.offset == len(tokens)
                tokens += event.token_ids
            elif isinstance(event, EngineFinished):
                return tokens, event
        raise EOFError

    async def is_idle(self) -> bool:
        load = await worker_pb2_grpc.WorkerServiceStub(self.channels.get(self.address)).GetLoad(pb.GetLoadRequest())
        return not load.running_tokens


@pytest.fixture
async def scene(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[Scene]:
    simulated = {"overhead_ms": 10.0, "reply_tokens": 1000}
    file = mesh_file([{"name": "only", "model": "sim", "engine": "simulated", "simulated": simulated}])
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(ChannelPool())
        sessions = await stack.enter_async_context(MultiplexerPool(channels))
        yield Scene(channels, sessions, file, redis.url, free_port())


def asked(name: str, tokens: int = 20, temperature: float = 0.0) -> GenerationRequest:
    sampling = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(name, TextPrompt("hello"), sampling)


async def begun(reply: AsyncGenerator[Any, None]) -> None:
    """Read a reply up to its first tokens."""
    while not isinstance(await anext(reply), TokenFrame):
        pass


async def test_replies_share_one_call(scene: Scene) -> None:
    async with scene.worker():
        session = scene.sessions.get(scene.address)
        found = await asyncio.gather(*(scene.reply(asked(f"r{i}")) for i in range(8)))
        assert scene.sessions.get(scene.address) is session
    for tokens, finished in found:
        assert len(tokens) == finished.usage.output_tokens == 20
        assert finished.reason is FinishReason.LENGTH


async def test_failures_are_our_errors_and_leave_the_call_alone(scene: Scene) -> None:
    async with scene.worker():
        session = scene.sessions.get(scene.address)
        with pytest.raises(InvalidRequest) as caught:
            await scene.reply(asked("r", temperature=-1.0))
        assert caught.value.problems[0].field == "sampling.temperature"
        with pytest.raises(DeadlineExceeded):
            await scene.reply(asked("slow", tokens=1000), timeout_s=0.05)
        replies = scene.events(asked("long", tokens=20_000))  # ten milliseconds each
        async with aclosing(replies):
            async for event in replies:
                if isinstance(event, TokenFrame):
                    with pytest.raises(AlreadyRunning):
                        await scene.reply(asked("long"))
                    break
        await until_answered(scene.is_idle)  # who stops reading has cancelled
        await scene.reply(asked("long"))
        assert scene.sessions.get(scene.address) is session


async def test_a_request_that_fits_no_message_fails_alone(scene: Scene) -> None:
    """It is refused before it is sent, naming its field; the reply beside it on the same call goes on."""
    async with scene.worker():
        session = scene.sessions.get(scene.address)
        beside = scene.events(asked("beside", 60))
        async with aclosing(beside):
            await begun(beside)
            large = replace(asked("large"), prompt=TextPrompt("x" * MAX_STEP_BYTES))
            with pytest.raises(MessageTooLarge) as caught:
                await scene.reply(large)
            assert caught.value.problems[0].field == "prompt"
            assert [event async for event in beside][-1].reason is FinishReason.LENGTH
        assert scene.sessions.get(scene.address) is session


async def test_a_worker_that_goes_takes_its_replies_and_a_new_one_is_found(scene: Scene) -> None:
    gone = AsyncExitStack()
    await gone.enter_async_context(scene.worker())
    replies = [scene.events(asked(f"r{i}", 1000)) for i in (1, 2)]
    for reply in replies:
        await begun(reply)
    await gone.aclose()
    for reply in replies:
        with pytest.raises(Unavailable):
            async for _ in reply:
                pass
    async with scene.worker():
        tokens, _ = await scene.reply(asked("r1"))
        assert len(tokens) == 20


async def test_a_channel_that_is_closed_fails_the_replies_on_it(scene: Scene) -> None:
    async with scene.worker():
        reply = scene.events(asked("r", 1000))
        await begun(reply)
        await scene.channels.keep(set())
        with pytest.raises(Unavailable):
            async for _ in reply:
                pass
        await scene.reply(asked("again"))


async def test_nobody_there_is_unavailable(scene: Scene) -> None:
    with pytest.raises(Unavailable):
        await scene.reply(asked("r"))
    with socket.create_server(("127.0.0.1", scene.port)):  # takes connections, says nothing
        with pytest.raises(Unavailable):
            await scene.reply(asked("r"))
        with pytest.raises(DeadlineExceeded):
            await scene.reply(asked("r"), timeout_s=0.0)


async def test_a_worker_that_falls_silent_is_left(scene: Scene) -> None:
    async with scene.worker():
        reply = scene.events(asked("r", 20_000), silence_s=0.001)
        with pytest.raises(Unavailable, match="silent"):  # a step takes ten times as long
            async for _ in reply:
                pass
        await until_answered(scene.is_idle)


async def test_the_largest_request_that_is_sent_fits_a_message() -> None:
    """Just under the limit the call takes it, whatever surrounds it; one byte over it is refused."""
    async with echoing() as (session, messages):
        empty = pb.ReplyStep(
            reply_id=1, start=pb.StartReply(request=pb.GenerateRequest(prompt=common_pb2.Prompt(text="x" * 10**7)))
        )
        overhead = empty.ByteSize() - 10**7 + 16  # the time-out is of up to 16 bytes

        async def one(characters: int) -> None:
            await ended(session, "x" * characters)

        await one(MAX_STEP_BYTES - overhead)
        with pytest.raises(MessageTooLarge):
            await one(MAX_STEP_BYTES)
        await one(1)
        assert [len(message) for message in messages] == [1, 1]


ROW = {"reply_ids": [1], "offsets": [0], "token_counts": [2], "texts": ["ab"], "token_ids": [97, 98]}


@pytest.mark.parametrize(
    "wrong", [None, {"token_ids": [97]}, {"token_ids": [97] * 3}, {"texts": []}, {"offsets": [0, 2]}]
)
async def test_columns_that_do_not_fit_together_end_the_call_and_no_token_is_made_up(
    wrong: dict[str, list[int]] | None,
) -> None:
    """The failure is that of the call: its replies go on elsewhere, and the worker is not taken for dead."""
    columns = pb.TokenColumns(**{**ROW, **(wrong or {})})  # type: ignore[arg-type]
    tokens: list[TokenFrame] = []
    async with echoing(pb.ReplyEvent(token_columns=columns)) as (session, _):
        if wrong is None:
            assert (await ended(session, "x", tokens.append)).HasField("finished")
            assert tokens == [TokenFrame(0, (97, 98), "ab")]
            return
        with pytest.raises(InstanceFailed) as caught:
            await ended(session, "x", tokens.append)
        assert caught.value.failure is Failure.CALL_BROKEN
        assert len(tokens) <= 1
        assert session.over


async def ended(
    session: ReplyMultiplexer, text: str, on_tokens: Callable[[TokenFrame], None] = lambda _: None
) -> pb.GenerateResponse:
    """The last event of a reply to a prompt."""
    request = pb.GenerateRequest(prompt=common_pb2.Prompt(text=text))
    return await session.reply(lambda message: message.CopyFrom(request), 60.0, {}, 30.0, lambda _: None, on_tokens)


@asynccontextmanager
async def echoing(*before: pb.ReplyEvent) -> AsyncIterator[tuple[ReplyMultiplexer, list[list[int]]]]:
    """A session with a server that ends every reply at once, behind other events, and what reply ids its messages had."""
    messages: list[list[int]] = []

    async def generate_many(
        asked: AsyncIterator[pb.GenerateManyRequest], context: object
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        async for message in asked:
            numbers = [step.reply_id for step in message.steps]
            messages.append(numbers)
            end = pb.GenerateResponse(finished=pb.EngineFinished())
            ends = [pb.ReplyEvent(reply_id=number, event=end) for number in numbers]
            yield pb.GenerateManyResponse(events=[*before, *ends])

    read, write = pb.GenerateManyRequest.FromString, pb.GenerateManyResponse.SerializeToString
    method = grpc.stream_stream_rpc_method_handler(generate_many, read, write)
    server = aio.server(options=server_options(Role.WORKER))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("penstock.worker.v1.WorkerService", {"GenerateMany": method})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with ChannelPool() as channels, MultiplexerPool(channels) as sessions:
        yield sessions.get(f"127.0.0.1:{port}"), messages
    await server.stop(0)


@pytest.mark.parametrize(("characters", "most"), [(10, 2), (400_000, 5), (2_000_000, 9)])
async def test_what_is_asked_at_once_goes_in_as_few_messages_as_its_size_allows(characters: int, most: int) -> None:
    """Two prompts of 0.4 MB share a message, those of 2 MB have one each; the first goes at once, alone."""
    async with echoing() as (session, messages):

        async def one() -> None:
            await ended(session, "x" * characters)

        await asyncio.gather(*(one() for _ in range(9)))
    assert [number for message in messages for number in message] == list(range(1, 10))
    assert len(messages) <= most
    if characters > MAX_JOINED_BYTES:
        assert all(len(message) == 1 for message in messages)
