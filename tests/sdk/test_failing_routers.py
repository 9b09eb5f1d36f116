"""Both clients against routers that break, refuse, cancel and fall silent: what can be answered is, every token once."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock import (
    AsyncClient,
    Client,
    ConflictError,
    Event,
    InvalidRequestError,
    PenstockError,
    RequestFailedError,
    RetryPolicy,
    Slo,
    Tokens,
    UnavailableError,
)
from penstock.client import connection
from penstock.client import errors as errors_of_the_sdk
from penstock.client.retries import is_retryable
from penstock.proto.router.v1 import router_pb2 as pb
from penstock.proto.router.v1 import router_pb2_grpc
from penstock.services.domain.errors import AlreadyRunning, DeadlineExceeded, NotFound, Overloaded, Unavailable, invalid
from penstock.services.domain.errors import PenstockError as DomainError
from penstock.services.grpc_types import Context
from penstock.services.processes import free_port
from tests.support.proxy import TcpProxy
from tests.support.router_servicers import (
    TEXT,
    Step,
    accepted,
    answer,
    breaking,
    duration,
    failing,
    go_away,
    reset_stream,
    scripted,
    token,
)
from tests.support.waiting import until

SILENCE_S = 1.5  # more than a busy machine leaves a process without a core
QUICK = RetryPolicy(initial_backoff_s=0.001, max_backoff_s=0.01)

Stream = Callable[..., Awaitable[list[Event]]]


async def stream_async(target: str | Sequence[str], timeout_s: float = 120.0, **options: Any) -> list[Event]:
    async with AsyncClient(target, **{"retry": QUICK, **options}) as client:
        return [event async for event in client.stream("hello", timeout_s=timeout_s)]


async def stream_blocking(target: str | Sequence[str], timeout_s: float = 120.0, **options: Any) -> list[Event]:
    def use() -> list[Event]:
        with Client(target, **{"retry": QUICK, **options}) as client:
            return list(client.stream("hello", timeout_s=timeout_s))

    return await asyncio.to_thread(use)


@pytest.fixture(params=[stream_async, stream_blocking], ids=["asyncio", "blocking"])
def stream(request: pytest.FixtureRequest) -> Stream:
    made: Stream = request.param
    return made


def assert_whole(events: list[Event]) -> None:
    """Every token once, in order."""
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [event.offset for event in tokens] == list(range(len(TEXT)))
    assert "".join(event.text for event in tokens) == TEXT


def silent(heartbeat_s: float | None, tokens: int | None, woken: asyncio.Event | None = None) -> Step:
    """A step that sends so many tokens, then nothing; None: not even `accepted`. woken: it goes on then."""

    async def step(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        if tokens is not None:
            yield accepted(heartbeat_s)
            for offset in range(tokens):
                yield token(offset)
        await (woken or asyncio.Event()).wait()
        async for response in answer(request, context):
            if not (response.HasField("tokens") and response.tokens.frame.offset < (tokens or 0)):
                yield response

    return step


@pytest.mark.parametrize("tokens", [None, 0, 3], ids=["before the first event", "after accepted", "amid tokens"])
@pytest.mark.parametrize(
    "error",
    [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE, Unavailable("draining"), Overloaded("full", 0.01)],
    ids=["cancelled", "unavailable", "draining", "overloaded"],
)
async def test_what_broke_is_repeated_at_the_same_router(
    stream: Stream, error: DomainError | grpc.StatusCode, tokens: int | None
) -> None:
    async with scripted(failing(error, tokens=tokens), failing(error, tokens=tokens), answer) as router:
        assert_whole(await stream(router.address))
        assert len(router.requests) == 3
        assert [len(request.resume.token_ids) for request in router.requests] == [0, tokens or 0, 2 * (tokens or 0)]


@pytest.mark.parametrize(
    ("reply", "close"),
    [
        (lambda _: b"", True),
        (go_away, True),
        (lambda _: go_away(0), False),
        (reset_stream(2), False),
        (reset_stream(7), False),
        (reset_stream(8), False),
    ],
    ids=[
        "connection reset",
        "goaway and close",
        "goaway before the stream",
        "rst internal",
        "rst refused",
        "rst cancel",
    ],
)
async def test_a_connection_or_stream_that_breaks_is_no_end(
    stream: Stream, reply: Callable[[int], bytes], close: bool
) -> None:
    async with breaking(reply, close=close) as broken, scripted(answer) as router:
        events = await stream([broken, router.address], timeout_s=120)
        assert_whole(events)


async def test_a_retry_sends_only_what_is_left_of_the_time_to_the_first_token() -> None:
    async with scripted(failing(Unavailable("down")), failing(Unavailable("down")), answer) as router:
        async with AsyncClient(router.address, retry=RetryPolicy(initial_backoff_s=0.01), timeout_s=60) as client:
            await client.generate("hello", slo=Slo(30.0, time_per_output_token_s=1.0))
        times_s = [r.slo.time_to_first_token.ToNanoseconds() / 1e9 for r in router.requests]
        assert times_s[0] == 30.0
        assert 30.0 > times_s[1] > times_s[2] > 0


async def test_nobody_listening_is_no_end_while_another_router_is_there(stream: Stream) -> None:
    free = f"127.0.0.1:{free_port()}"
    async with scripted(answer) as router:
        assert_whole(await stream([free, router.address]))
    with pytest.raises(UnavailableError):
        await stream(free, retry=RetryPolicy(initial_backoff_s=0.001, max_backoff_s=0.01, unavailable_timeout_s=0.05))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (invalid("prompt", "is empty"), InvalidRequestError),
        (NotFound("tier", "huge"), PenstockError),
        (AlreadyRunning("r"), ConflictError),
        (grpc.StatusCode.FAILED_PRECONDITION, RequestFailedError),
        (grpc.StatusCode.UNIMPLEMENTED, PenstockError),
        (grpc.StatusCode.INTERNAL, PenstockError),
        (DeadlineExceeded("late"), PenstockError),
    ],
)
async def test_what_another_attempt_cannot_mend_is_asked_once(
    stream: Stream, error: DomainError | grpc.StatusCode, raised: type[Exception]
) -> None:
    async with scripted(failing(error)) as one, scripted(answer) as other:
        with pytest.raises(raised):
            await stream([one.address, other.address])
        assert (len(one.requests), len(other.requests)) == (1, 0)


@pytest.mark.parametrize("tokens", [0, 3], ids=["before the first token", "amid tokens"])
async def test_a_silent_router_is_left_and_the_reply_goes_on_at_the_next(stream: Stream, tokens: int) -> None:
    async with scripted(silent(0.01, tokens)) as stuck, scripted(answer) as router:
        began = time.monotonic()
        assert_whole(await stream([stuck.address, router.address], silence_s=SILENCE_S))
        assert time.monotonic() - began >= SILENCE_S
        await asyncio.wait_for(stuck.cancelled.wait(), 60)
        sent = router.requests[0]
        assert list(sent.resume.token_ids) == list(range(tokens))
        assert sent.request_id == "r"
        if tokens:
            assert sent.sampling.seed == 7


async def test_a_router_that_says_nothing_at_all_is_left_once_its_heartbeats_are_known() -> None:
    """It is stopped while no stream is open: the next request is sent there and hears nothing."""
    async with scripted(answer) as router, scripted(silent(0.01, 0), silent(None, None)) as stuck:
        for make in (AsyncClient, Client):
            targets = [stuck.address, router.address]

            async def use(targets: list[str] = targets) -> None:
                async with AsyncClient(targets, retry=QUICK, silence_s=SILENCE_S) as client:
                    assert (await client.generate("hello")).text == TEXT
                    client._routers.preferred = 0
                    assert (await client.generate("hello")).text == TEXT

            def use_blocking(targets: list[str] = targets) -> None:
                with Client(targets, retry=QUICK, silence_s=SILENCE_S) as client:
                    client._routers.heartbeat_s[0] = 0.01
                    assert client.generate("hello").text == TEXT

            await (use() if make is AsyncClient else asyncio.to_thread(use_blocking))
        assert len(stuck.requests) == 3


async def test_heartbeats_keep_a_stream_that_has_nothing_to_say(stream: Stream) -> None:
    async def slow(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        for _ in range(9):  # longer than the limit; heartbeats come far more often than they need to
            yield pb.GenerateResponse(heartbeat=pb.Heartbeat(interval=duration(0.1)))
            await asyncio.sleep(0.25)
        async for response in answer(request, context):
            yield response

    async with scripted(slow) as router:
        events = await stream(router.address, silence_s=2.0)
        assert_whole(events)
        assert len(events) == len(TEXT) + 2, "heartbeats are not for the caller"
        assert len(router.requests) == 1


async def test_a_router_without_heartbeats_is_waited_for(stream: Stream) -> None:
    """An older router: its silence says nothing, however short the limit."""
    woken = asyncio.Event()
    async with scripted(silent(None, 2, woken)) as router:
        asking = asyncio.ensure_future(stream(router.address, silence_s=0.05))
        await asyncio.sleep(0.5)  # ten limits: nothing may happen meanwhile, which has no condition to wait for
        assert not asking.done()
        woken.set()
        assert_whole(await asking)
        assert len(router.requests) == 1


async def test_a_reader_that_takes_its_time_is_no_silence_of_the_router() -> None:
    async def steady(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        yield accepted(0.01)
        async for response in answer(request, context):
            yield response

    def blocking(address: str) -> list[Event]:
        with Client(address, retry=QUICK, silence_s=2.0) as client:
            events: list[Event] = []
            for event in client.stream("hello"):
                if len(events) == 2:
                    time.sleep(2.5)
                events.append(event)
            return events

    async with scripted(steady) as router:
        async with AsyncClient(router.address, retry=QUICK, silence_s=2.0) as client:
            events: list[Event] = []
            async for event in client.stream("hello"):
                if len(events) == 2:
                    await asyncio.sleep(2.5)
                events.append(event)
        assert_whole(events)
        assert_whole(await asyncio.to_thread(blocking, router.address))
        assert len(router.requests) == 2


async def test_a_cancellation_by_the_user_is_not_repeated() -> None:
    async with scripted(silent(0.01, 2)) as router:
        async with AsyncClient(router.address, retry=QUICK, silence_s=30) as client:
            begun = asyncio.Event()

            async def use() -> None:
                async for _ in client.stream("hello"):
                    begun.set()

            task = asyncio.create_task(use())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(router.cancelled.wait(), 60)
            asking = asyncio.create_task(client.generate("hello"))
            await until(lambda: len(router.requests) == 2)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert len(router.requests) == 2


async def test_a_client_that_is_closed_ends_what_is_under_way() -> None:
    async with scripted(silent(0.01, 2)) as router:
        made = AsyncClient(router.address, retry=QUICK, silence_s=30)
        streamed = made.stream("hello")
        await anext(streamed)
        closing = asyncio.create_task(made.close())
        with pytest.raises(PenstockError, match="closed"):
            async for _ in streamed:
                pass
        await closing
        with pytest.raises(PenstockError, match="closed"):
            await made.generate("hello")
        router.requests.clear()
        client = Client(router.address, retry=QUICK, silence_s=30)
        events = client.stream("hello")
        await asyncio.to_thread(next, events)
        rest = asyncio.ensure_future(asyncio.to_thread(list, events))
        client.close()
        with pytest.raises(PenstockError, match="closed"):
            await rest
        with pytest.raises(PenstockError, match="closed"):
            client.generate("hello")
        assert len(router.requests) == 1


async def test_a_half_open_connection_is_found_by_keepalive_also_after_many_pings() -> None:
    """The network drops everything: without heartbeats, the ping that nobody acknowledges ends the call."""
    quiet, options = asyncio.Event(), connection.channel_options(0.1, 3.0)

    async def patient(request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        yield accepted()
        await asyncio.sleep(1.0)  # ten pings, with no data between them
        quiet.set()
        await asyncio.Event().wait()

    async with (
        scripted(patient) as router,
        TcpProxy(int(router.address.rpartition(":")[2])) as proxy,
        aio.insecure_channel(f"127.0.0.1:{proxy.port}", options=options) as channel,
    ):
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(pb.GenerateRequest(), timeout=60)
        await call.read()
        await quiet.wait()
        proxy.blackhole()
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert is_retryable(errors_of_the_sdk.from_rpc(caught.value))


async def test_what_is_only_asked_is_asked_of_another_router_where_one_is_away() -> None:
    free = f"127.0.0.1:{free_port()}"

    def use(target: list[str]) -> None:
        with Client(target, admin=target) as client:
            assert client.models() == []
            assert client.status().router_id == "stuck"

    async with scripted(answer) as router:
        async with AsyncClient([free, router.address], admin=[free, router.address]) as client:
            assert await client.models() == []
            assert (await client.status()).router_id == "stuck"
            assert await client.traces() == []
        await asyncio.to_thread(use, [free, router.address])
        async with AsyncClient(free) as client:
            with pytest.raises(UnavailableError):
                await client.models()


async def test_a_status_that_is_watched_and_stops_coming_is_an_error() -> None:
    def use(target: str) -> None:
        with Client(target, admin=target, silence_s=0.1) as client:
            for status in client.watch_status(0.5):
                assert status.router_id == "stuck"

    async with scripted(answer) as router:
        async with AsyncClient(router.address, admin=router.address, silence_s=0.1) as client:
            statuses = client.watch_status(0.5)
            assert (await anext(statuses)).router_id == "stuck"
            with pytest.raises(UnavailableError, match=r"silent for 1\.5 s"):
                await anext(statuses)
        with pytest.raises(UnavailableError, match=r"silent for 1\.5 s"):
            await asyncio.to_thread(use, router.address)


@pytest.mark.parametrize("client", [AsyncClient, Client])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"silence_s": 0}, "silence_s"),
        ({"silence_s": float("nan")}, "silence_s"),
        ({"keepalive_s": 1}, "keepalive_s"),
        ({"keepalive_s": float("inf")}, "keepalive_s"),
        ({"load_balancing": "random"}, "load_balancing: must be pick_first or round_robin"),
    ],
)
def test_limits_that_make_no_sense_name_their_option(client: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        client("127.0.0.1:1", **options)
