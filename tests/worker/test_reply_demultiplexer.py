"""GenerateMany: many replies over one call, as the worker serves it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2
from grpc import aio

from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services import errors
from penstock.services.domain.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InvalidRequest,
    MessageTooLarge,
    Overloaded,
)
from penstock.services.interceptors import CallRecorder
from penstock.services.runtime import Chassis
from penstock.types.replies import PositionLogprobs, TokenFrame, TokenLogprob
from penstock.worker_service.engine.simulated.engine import SimulatedRunner
from penstock.worker_service.engine.torch.runner import TorchRunner
from penstock.worker_service.replies import reply_demultiplexer
from penstock.worker_service.replies.replies import ReplyWriter
from penstock.worker_service.replies.reply_demultiplexer import (
    MAX_BYTES,
    MAX_EVENT_BYTES,
    MAX_EVENTS,
    ReplyDemultiplexer,
    Serve,
)
from penstock.worker_service.replies.token_columns import MAX_CHARACTER_BYTES
from tests.support.held_engine import held_engines
from tests.support.mesh import Stub
from tests.support.telemetry_off import telemetry_off
from tests.worker.test_worker_service import asked, stub, stub_and_worker

__all__ = ["stub", "stub_and_worker"]


def start(reply_id: int, request: pb.GenerateRequest, **options: object) -> pb.GenerateManyRequest:
    reply = pb.StartReply(request=request, **options)  # type: ignore[arg-type]
    return pb.GenerateManyRequest(steps=[pb.ReplyStep(reply_id=reply_id, start=reply)])


def cancel(reply_id: int) -> pb.GenerateManyRequest:
    return pb.GenerateManyRequest(steps=[pb.ReplyStep(reply_id=reply_id, cancel=pb.CancelReply())])


def joined(*messages: pb.GenerateManyRequest) -> pb.GenerateManyRequest:
    return pb.GenerateManyRequest(steps=[step for message in messages for step in message.steps])


def plain(message: pb.GenerateManyResponse) -> list[pb.ReplyEvent]:
    """The events of a message in order, each row of its columns as an event of its own."""
    events = list[pb.ReplyEvent]()
    for said in message.events:
        if not said.HasField("token_columns"):
            events.append(said)
            continue
        columns, at = said.token_columns, 0
        rows = zip(columns.reply_ids, columns.offsets, columns.token_counts, columns.texts, strict=True)
        for reply_id, offset, count, text in rows:
            token_ids, at = columns.token_ids[at : at + count], at + count
            tokens = common_pb2.TokenFrame(offset=offset, token_ids=token_ids, text=text)
            events.append(pb.ReplyEvent(reply_id=reply_id, event=pb.GenerateResponse(tokens=tokens)))
        assert events
        assert at == len(columns.token_ids)
    return events


class Heard:
    """What a call has said so far, by reply."""

    def __init__(self, call: "aio.StreamStreamCall[pb.GenerateManyRequest, pb.GenerateManyResponse]") -> None:
        self.call = call
        self.events: dict[int, list[pb.GenerateResponse]] = {}
        self.failures: dict[int, Exception] = {}

    def kinds(self, reply_id: int) -> list[str | None]:
        return [event.WhichOneof("event") for event in self.events.get(reply_id, [])]

    def tokens(self, reply_id: int) -> list[int]:
        return [token for event in self.events[reply_id] for token in event.tokens.token_ids]

    def over(self, *replies: int) -> bool:
        return all(r in self.failures or self.kinds(r)[-1:] == ["finished"] for r in replies)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read on; EOFError where the call ends first."""
        while not condition():
            message = await self.call.read()
            if not isinstance(message, pb.GenerateManyResponse):
                raise EOFError
            assert message.events
            for said in plain(message):
                assert said.reply_id not in self.failures
                if said.HasField("failure"):
                    status = status_pb2.Status.FromString(said.failure)
                    self.failures[said.reply_id] = errors.from_proto(status)
                else:
                    self.events.setdefault(said.reply_id, []).append(said.event)


def tokens_used(finished: pb.EngineFinished) -> common_pb2.Usage:
    """The usage without its share of the steps' time."""
    usage = common_pb2.Usage()
    usage.CopyFrom(finished.usage)
    usage.ClearField("compute_s")
    return usage


async def test_replies_are_what_generate_gives(stub: Stub) -> None:
    alone = [event async for event in stub.Generate(asked())]
    call = stub.GenerateMany()
    for number in range(1, 5):
        await call.write(start(number, asked(f"r{number}")))
    heard = Heard(call)
    await heard.until(lambda: heard.over(1, 2, 3, 4))
    for number in range(1, 5):
        assert heard.kinds(number)[0] == "admitted"
        assert heard.tokens(number) == [token for event in alone for token in event.tokens.token_ids]
        assert tokens_used(heard.events[number][-1].finished) == tokens_used(alone[-1].finished)
    await call.done_writing()
    with pytest.raises(EOFError):
        await heard.until(lambda: False)
    assert await call.code() is grpc.StatusCode.OK


@pytest.fixture
def slow_engines() -> Iterator[None]:
    """Long replies do not end before a test is done with them."""
    with held_engines(runners=(SimulatedRunner, TorchRunner), step_s=0.02):
        yield


@pytest.mark.usefixtures("slow_engines")
async def test_one_replys_failure_is_its_own(stub: Stub) -> None:
    call = stub.GenerateMany()
    long = asked("long", max_tokens=1500)
    await call.write(start(1, long))
    heard = Heard(call)
    await heard.until(lambda: "tokens" in heard.kinds(1))
    await call.write(start(2, long))
    await call.write(start(3, asked("r", temperature=-1.0)))
    await call.write(start(4, asked("late", max_tokens=1500), timeout=Duration(nanos=20_000_000)))
    await heard.until(lambda: {2, 3, 4} <= heard.failures.keys())
    assert isinstance(heard.failures[2], AlreadyRunning)
    assert isinstance(refused := heard.failures[3], InvalidRequest)
    assert refused.problems[0].field == "sampling.temperature"
    assert isinstance(heard.failures[4], DeadlineExceeded)
    more = [start(number, asked(f"r{number}", max_tokens=1500)) for number in range(5, 10)]
    for step in more:  # four places and a waiting one: the first reply has one of them still
        await call.write(step)
    await heard.until(lambda: 9 in heard.failures)
    assert isinstance(heard.failures[9], Overloaded)
    got = len(heard.tokens(1))
    await heard.until(lambda: len(heard.tokens(1)) > got)
    call.cancel()


@pytest.mark.usefixtures("slow_engines")
async def test_cancelling_a_reply_frees_its_place_and_leaves_the_others(stub: Stub) -> None:
    call = stub.GenerateMany()
    heard = Heard(call)
    for number in (1, 2):
        await call.write(start(number, asked(f"r{number}", max_tokens=1500)))
    await heard.until(lambda: all("tokens" in heard.kinds(number) for number in (1, 2)))
    await call.write(cancel(1))
    await call.write(cancel(77))  # nobody's: no error
    while len((await stub.GetLoad(pb.GetLoadRequest())).running_tokens) != 1:
        await asyncio.sleep(0)
    await call.write(start(3, asked("r1")))  # its name is free as well
    await heard.until(lambda: heard.over(3))
    assert heard.kinds(3)[-1] == "finished"
    call.cancel()
    while (await stub.GetLoad(pb.GetLoadRequest())).running_tokens:  # the call's end is that of its replies
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("steps", "field"),
    [
        ([pb.GenerateManyRequest()], "steps"),
        ([pb.GenerateManyRequest(steps=[pb.ReplyStep(reply_id=1)])], "steps.step"),
        ([start(2, asked("a")), start(2, asked("b"))], "steps.reply_id"),
        ([joined(start(2, asked("a")), start(2, asked("b")))], "steps.reply_id"),
        ([start(0, asked("a"))], "steps.reply_id"),
    ],
)
async def test_messages_that_make_no_sense_end_the_call(
    stub: Stub, steps: list[pb.GenerateManyRequest], field: str
) -> None:
    call = stub.GenerateMany()
    heard = Heard(call)
    for step in steps:
        await call.write(step)
    with pytest.raises(aio.AioRpcError) as caught:
        await heard.until(lambda: False)
    refused = errors.from_rpc(caught.value)
    assert isinstance(refused, InvalidRequest)
    assert refused.problems[0].field == field
    while (await stub.GetLoad(pb.GetLoadRequest())).running_tokens:
        await asyncio.sleep(0)


async def test_a_draining_worker_ends_the_call_behind_its_last_reply(stub_and_worker: tuple[Stub, Chassis]) -> None:
    stub, worker = stub_and_worker
    call = stub.GenerateMany()
    heard = Heard(call)
    await call.write(start(1, asked("r", max_tokens=200)))
    await heard.until(lambda: "tokens" in heard.kinds(1))
    async with aio.insecure_channel(worker.admin_address) as admin:
        drain = worker_pb2_grpc.WorkerServiceStub(admin).Drain(pb.DrainRequest(), timeout=60)
        with pytest.raises(EOFError):
            await heard.until(lambda: False)
        assert heard.over(1)
        assert await call.code() is grpc.StatusCode.OK
        assert (await drain).cut_off_count == 0


END = pb.GenerateResponse(finished=pb.EngineFinished())


def session(serve: Serve) -> ReplyDemultiplexer:
    return ReplyDemultiplexer(serve, CallRecorder(telemetry_off()), asyncio.Event())


async def steps(*messages: pb.GenerateManyRequest) -> AsyncIterator[pb.GenerateManyRequest]:
    for message in messages:
        yield message


def frame(offset: int, text: str = "") -> TokenFrame:
    return TokenFrame(offset, (offset,), text)


@pytest.mark.parametrize("streamed", [False, True])
async def test_admitted_comes_with_the_first_tokens_where_the_caller_lets_tokens_wait(
    monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """One message less for a reply that is not streamed; a streamed one is announced after the usual delay, here none."""
    monkeypatch.setattr(reply_demultiplexer, "UNSTREAMED_ADMITTED_DELAY_S", 1e6)
    monkeypatch.setattr(reply_demultiplexer, "ADMITTED_DELAY_S", 1e-9)
    computed, ended = asyncio.Event(), asyncio.Event()

    async def serve(request: pb.GenerateRequest, writer: ReplyWriter) -> pb.GenerateResponse:
        writer.event(pb.GenerateResponse(admitted=pb.Admitted()))
        await computed.wait()
        writer.tokens(frame(0))
        return END

    async def requests() -> AsyncIterator[pb.GenerateManyRequest]:
        yield start(1, pb.GenerateRequest(output_interval=None if streamed else Duration(nanos=250_000_000)))
        await ended.wait()

    async with asyncio.timeout(60), aclosing(session(serve).run(requests())) as messages:
        first = asyncio.ensure_future(anext(messages))
        if not streamed:
            for _ in range(100):
                await asyncio.sleep(0)
            assert not first.done()
            computed.set()
        kinds = [event.event.WhichOneof("event") for event in plain(await first)]
        assert kinds[:2] == (["admitted"] if streamed else ["admitted", "tokens"])
        computed.set()
        ended.set()
        assert [event async for message in messages for event in plain(message)] or "finished" in kinds


async def test_what_is_said_at_once_comes_in_one_message_and_one_batch_of_columns() -> None:
    waiting: list[asyncio.Future[None]] = []

    async def serve(request: pb.GenerateRequest, writer: ReplyWriter) -> pb.GenerateResponse:
        for offset in range(3):
            waiting.append(asyncio.get_running_loop().create_future())
            await waiting[-1]
            writer.tokens(frame(offset))
        return END

    requests = [start(number, asked(f"r{number}")) for number in range(1, 33)]
    messages = session(serve).run(steps(requests[0], joined(*requests[1:])))
    for offset in range(3):
        message = asyncio.ensure_future(anext(messages))
        while len(waiting) < 32:
            await asyncio.sleep(0)
        step, waiting[:] = list(waiting), []
        for future in step:
            future.set_result(None)
        (event, *terminal) = (await message).events
        assert list(event.token_columns.offsets) == list(event.token_columns.token_ids) == [offset] * 32
        assert sorted(event.token_columns.reply_ids) == list(range(1, 33))
        assert not terminal or offset == 2
    rest = [event async for message in messages for event in message.events]
    assert {event.event.WhichOneof("event") for event in [*terminal, *rest]} == {"finished"}


async def test_a_backlog_keeps_its_order_and_fits_into_messages() -> None:
    """Tokens stay behind the events before them and before those behind them, whatever they share a message with."""

    async def serve(request: pb.GenerateRequest, writer: ReplyWriter) -> pb.GenerateResponse:
        for number in range(MAX_EVENTS):
            writer.event(pb.GenerateResponse(move_advice=pb.MoveAdvice(tokens=number)))
            writer.tokens(frame(number))
        return END

    messages = session(serve).run(steps(start(1, asked("a")), start(2, asked("b"))))
    heard: dict[int, list[tuple[str | None, int]]] = {1: [], 2: []}
    async for message in messages:
        assert 0 < len(message.events) <= MAX_EVENTS
        for said in plain(message):
            event = said.event
            heard[said.reply_id].append((event.WhichOneof("event"), event.tokens.offset + event.move_advice.tokens))
        for _ in range(100):  # a reader that is slow: the replies go on meanwhile
            await asyncio.sleep(0)
    whole = [(kind, number) for number in range(MAX_EVENTS) for kind in ("move_advice", "tokens")]
    assert heard == {1: [*whole, ("finished", 0)], 2: [*whole, ("finished", 0)]}


async def test_a_fault_is_told_without_its_details_and_ends_its_reply_alone() -> None:
    async def serve(request: pb.GenerateRequest, writer: ReplyWriter) -> pb.GenerateResponse:
        writer.tokens(frame(0))
        if request.request_id == "bad":
            raise RuntimeError("a secret")
        return END

    requests = [start(number, asked(name)) for number, name in enumerate(("bad", "good"), 1)]
    messages = session(serve).run(steps(*requests))
    said = [event async for message in messages for event in plain(message)]
    failures = {event.reply_id: event.failure for event in said if event.HasField("failure")}
    assert failures.keys() == {1}
    status = status_pb2.Status.FromString(failures[1])
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in status.message
    assert [event.event.WhichOneof("event") for event in said if event.reply_id == 2] == ["tokens", "finished"]


@pytest.mark.parametrize("with_logprobs", [False, True])
async def test_what_fits_no_message_fails_its_own_reply_and_large_events_go_alone(with_logprobs: bool) -> None:
    """Messages stay under a size; what is said before and beside the event that is too large arrives."""

    def tokens(offset: int, size: int) -> TokenFrame:
        """A frame of about that many bytes: in columns, or with logprobs, which has an event of its own."""
        if not with_logprobs:
            return frame(offset, "x" * (size // MAX_CHARACTER_BYTES))
        logprobs = (PositionLogprobs(TokenLogprob(1, 0.0, b"x" * size)),)
        return TokenFrame(offset, (offset,), "", logprobs)

    said = asyncio.Event()

    async def serve(request: pb.GenerateRequest, writer: ReplyWriter) -> pb.GenerateResponse:
        writer.tokens(tokens(0, 16))
        for number in range(3):
            writer.tokens(tokens(1 + number, MAX_BYTES // 2))
        said.set()
        if request.request_id == "too large":
            writer.tokens(tokens(4, MAX_EVENT_BYTES))
        return END

    both = joined(start(1, asked("too large")), start(2, asked("beside")))
    events: dict[int, list[pb.ReplyEvent]] = {1: [], 2: []}
    async for message in session(serve).run(steps(both)):
        await said.wait()  # the next message could have it all
        assert message.ByteSize() <= MAX_BYTES + 64
        for event in plain(message):
            events[event.reply_id].append(event)
    assert [e.WhichOneof("said") for e in events[1]] == ["event"] * 4 + ["failure"]
    failure = errors.from_proto(status_pb2.Status.FromString(events[1][-1].failure))
    assert isinstance(failure, MessageTooLarge)
    assert events[2][-1].event.WhichOneof("event") == "finished"
    assert len(events[2]) == 5
