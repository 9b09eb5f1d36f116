"""The router's call to one worker, shared by all replies that it has there.

The worker's end of the call is `worker_service/reply_demultiplexer.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2
from grpc import aio

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from router_service.domain.failures import Failure, InstanceFailed
from services import errors
from services.channels import MAX_MESSAGE_BYTES, ChannelPool
from services.domain.errors import DeadlineExceeded, MessageTooLarge, PenstockError
from services.stalls import StallMonitor

MOST_BYTES = 1 << 20  # of what several replies ask in one message; one that asks for more has a message to itself
MAX_STEP_BYTES = MAX_MESSAGE_BYTES - 64  # what surrounds a step in a message of its own takes less than 64 bytes


class _Reply:
    """A reply that is read. sent: its request has left for the worker."""

    __slots__ = ("events", "sent")

    def __init__(self) -> None:
        self.events: asyncio.Queue[pb.ReplyEvent | PenstockError] = asyncio.Queue()
        self.sent = False


class ReplyMultiplexer:
    """One call of GenerateMany; begins with the first reply, and `over` once it has ended, for whatever reason."""

    def __init__(self, channel: aio.Channel, stalls: StallMonitor) -> None:
        self._stalls = stalls
        self._steps: deque[pb.ReplyStep] = deque()
        self._news = asyncio.Event()
        self._replies: dict[int, _Reply] = {}
        self._begun = 0
        self.over = False
        self._task = asyncio.create_task(self._read(channel))

    @property
    def replies(self) -> int:
        """Replies under way."""
        return len(self._replies)

    async def close(self) -> None:
        """End the call and with it every reply."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def reply(
        self, request: pb.GenerateRequest, timeout_s: float, trace_context: Mapping[str, str], silence_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """What the worker says of one request, without end: the terminal event is the last there is.

        Leaving the iteration before it cancels the reply.

        Raises:
            PenstockError: What the worker said.
            InstanceFailed: There is no connection, it broke, the shared call ended, or nothing came for `silence_s`,
                stalls of this process left out.
            MessageTooLarge: The request does not fit a message; nothing has been sent.
            DeadlineExceeded: `timeout_s` has passed, whatever the worker does.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        self._begun += 1
        reply_id, reply = self._begun, _Reply()
        timeout = Duration()
        timeout.FromNanoseconds(max(0, round(timeout_s * 1e9)))
        start = pb.StartReply(request=request, timeout=timeout, trace_context=trace_context)
        step = pb.ReplyStep(reply_id=reply_id, start=start)
        if (size := step.ByteSize()) > MAX_STEP_BYTES:  # gRPC would end the call for it, with all replies on it
            raise MessageTooLarge.by("prompt", size, MAX_STEP_BYTES)
        self._replies[reply_id] = reply
        self._step(step)
        at_work = True
        try:
            while True:
                try:
                    said = reply.events.get_nowait()
                except asyncio.QueueEmpty:
                    said = await self._stalls.get(reply.events, silence_s, deadline_s)
                if isinstance(said, PenstockError):
                    at_work = False
                    raise said
                if said.HasField("failure"):
                    at_work = False
                    raise errors.from_proto(status_pb2.Status.FromString(said.failure))
                at_work = said.event.WhichOneof("event") not in ("finished", "handed_over")
                yield said.event
        except TimeoutError:
            if loop.time() >= deadline_s:
                raise DeadlineExceeded("the deadline passed") from None
            failure = Failure.SILENT if reply.sent else Failure.CONNECT_FAILED
            raise InstanceFailed(failure, f"the worker was silent for {silence_s:g} s") from None
        finally:
            del self._replies[reply_id]
            if at_work and not self.over:
                self._step(pb.ReplyStep(reply_id=reply_id, cancel=pb.CancelReply()))

    async def _read(self, channel: aio.Channel) -> None:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.GenerateMany(self._outgoing())
        failure, why = Failure.CALL_BROKEN, "the worker ended the stream in the middle"
        try:
            while isinstance(message := await call.read(), pb.GenerateManyResponse):
                for said in message.events:
                    if (reply := self._replies.get(said.reply_id)) is not None:
                        reply.events.put_nowait(said)
        except aio.AioRpcError as error:
            why = str(errors.from_rpc(error))
            if error.code() is grpc.StatusCode.UNAVAILABLE and not errors.is_ours(error):
                failure = Failure.INSTANCE_DIED
        finally:
            self.over = True
            call.cancel()
            self._news.set()  # a call that ends by itself leaves the task that sends waiting
            for reply in self._replies.values():
                unsent = failure is Failure.INSTANCE_DIED and not reply.sent
                reply.events.put_nowait(InstanceFailed(Failure.CONNECT_FAILED if unsent else failure, why))

    def _step(self, step: pb.ReplyStep) -> None:
        self._steps.append(step)
        self._news.set()

    async def _outgoing(self) -> AsyncIterator[pb.GenerateManyRequest]:
        """While a message is being sent the next one fills, up to a size."""
        while not self.over:
            await self._news.wait()
            self._news.clear()
            while self._steps:
                now = [self._steps.popleft()]
                room = MOST_BYTES - now[0].ByteSize()
                while self._steps and (room := room - self._steps[0].ByteSize()) >= 0:
                    now.append(self._steps.popleft())
                yield pb.GenerateManyRequest(steps=now)
                for (
                    step
                ) in now:  # gRPC asks for the next message once it has this one on its way, not before it is connected
                    if (reply := self._replies.get(step.reply_id)) is not None:
                        reply.sent = True


class MultiplexerPool(AbstractAsyncContextManager["MultiplexerPool"]):
    """Sessions by address, as long as the context lasts; one that is over is begun anew."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels
        self._sessions: dict[str, ReplyMultiplexer] = {}
        self._stalls = StallMonitor()

    async def __aenter__(self) -> "MultiplexerPool":
        await self._stalls.__aenter__()
        return self

    def get(self, address: str) -> ReplyMultiplexer:
        session = self._sessions.get(address)
        if session is None or session.over:
            self._sessions = {a: s for a, s in self._sessions.items() if not s.over}
            session = self._sessions[address] = ReplyMultiplexer(self._channels.get(address), self._stalls)
        return session

    def in_use(self) -> set[str]:
        """Addresses with replies under way."""
        return {address for address, session in self._sessions.items() if session.replies and not session.over}

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            await session.close()
        await self._stalls.__aexit__(kind, error, trace)
