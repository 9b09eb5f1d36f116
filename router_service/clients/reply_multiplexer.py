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
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc import aio

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from router_service.domain.failures import Failure, InstanceFailed
from services import errors
from services import proto_codec as common
from services.channels import MAX_MESSAGE_BYTES, ChannelPool
from services.domain.errors import DeadlineExceeded, MessageTooLarge, PenstockError
from services.domain.requests import TokenFrame
from services.event_streams import EventStream, OnTokens
from services.stalls import Listener, SilenceWatch, StallMonitor

MOST_BYTES = 1 << 20  # of what several replies ask in one message; one that asks for more has a message to itself
TERMINAL = ("finished", "handed_over")
MAX_STEP_BYTES = MAX_MESSAGE_BYTES - 64  # what surrounds a step in a message of its own takes less than 64 bytes


class _Reply(Listener):
    """A reply that is read. sent: its request has left for the worker."""

    __slots__ = ("sent", "stream")

    def __init__(self, silence_s: float, deadline_s: float, on_tokens: OnTokens | None) -> None:
        super().__init__(silence_s, deadline_s)
        self.stream = EventStream[pb.GenerateResponse](on_tokens)
        self.sent = False

    def on_silence(self) -> None:
        failure = Failure.SILENT if self.sent else Failure.CONNECT_FAILED
        self.stream.fail(InstanceFailed(failure, f"the worker was silent for {self.silence_s:g} s"))

    def on_deadline(self) -> None:
        self.stream.fail(DeadlineExceeded("the deadline passed"))


class ReplyMultiplexer:
    """One call of GenerateMany; begins with the first reply, and `over` once it has ended, for whatever reason."""

    def __init__(self, channel: aio.Channel, watch: SilenceWatch) -> None:
        self._watch = watch
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
        self,
        request: pb.GenerateRequest,
        timeout_s: float,
        trace_context: Mapping[str, str],
        silence_s: float,
        on_tokens: OnTokens | None = None,
    ) -> AsyncGenerator[pb.GenerateResponse | TokenFrame, None]:
        """The worker's events for one request, without end: the terminal event is the last there is.

        on_tokens: takes the frames of tokens (`EventStream`); without it they are iterated. Leaving the iteration before the
        terminal event cancels the reply.

        Raises:
            PenstockError: The worker's error.
            InstanceFailed: There is no connection, it broke, the shared call ended, or nothing came for `silence_s`,
                stalls of this process left out.
            MessageTooLarge: The request does not fit a message; nothing has been sent.
            DeadlineExceeded: `timeout_s` has passed, whatever the worker does.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._begun += 1
        reply_id = self._begun
        timeout = Duration()
        timeout.FromNanoseconds(max(0, round(timeout_s * 1e9)))
        start = pb.StartReply(request=request, timeout=timeout, trace_context=trace_context)
        step = pb.ReplyStep(reply_id=reply_id, start=start)
        if (size := step.ByteSize()) > MAX_STEP_BYTES:  # gRPC would end the call for it, with all replies on it
            raise MessageTooLarge.by("prompt", size, MAX_STEP_BYTES)
        reply = self._replies[reply_id] = _Reply(silence_s, deadline_s, on_tokens)
        self._watch.begin(reply)
        self._step(step)
        running_there = True
        try:
            while True:
                event = await reply.stream.get()
                running_there = isinstance(event, TokenFrame) or event.WhichOneof("event") not in TERMINAL
                yield event
        except WorkerError as error:
            running_there = False
            raise error.error from None
        finally:
            self._watch.end(reply)
            del self._replies[reply_id]
            if running_there and not self.over:
                self._step(pb.ReplyStep(reply_id=reply_id, cancel=pb.CancelReply()))

    async def _read(self, channel: aio.Channel) -> None:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.GenerateMany(self._outgoing())
        failure, why = Failure.CALL_BROKEN, "the worker ended the stream in the middle"
        try:
            while isinstance(message := await call.read(), pb.GenerateManyResponse):
                self._take(message)
        except aio.AioRpcError as error:
            why = str(errors.from_rpc(error))
            if error.code() is grpc.StatusCode.UNAVAILABLE and not errors.is_ours(error):
                failure = Failure.INSTANCE_DIED
        except (ValueError, DecodeError) as error:
            why = f"a message that breaks the protocol: {error}"
        finally:
            self.over = True
            call.cancel()
            self._news.set()  # a call that ends by itself leaves the task that sends waiting
            for reply in self._replies.values():
                unsent = failure is Failure.INSTANCE_DIED and not reply.sent
                reply.stream.fail(InstanceFailed(Failure.CONNECT_FAILED if unsent else failure, why))

    def _take(self, message: pb.GenerateManyResponse) -> None:
        """Hand the events of a message to their replies, those of one reply in order.

        Raises:
            ValueError: Columns do not fit together.
            DecodeError: A failure is no status.
        """
        now_s, stalled_s = self._watch.now()
        replies = self._replies
        for event in message.events:
            if event.HasField("token_columns"):
                columns, at = event.token_columns, 0
                token_ids = tuple(columns.token_ids)
                if sum(columns.token_counts) != len(token_ids):
                    raise ValueError(f"{sum(columns.token_counts)} tokens announced, {len(token_ids)} sent")
                rows = zip(columns.reply_ids, columns.offsets, columns.token_counts, columns.texts, strict=True)
                for reply_id, offset, count, text in rows:
                    end = at + count
                    if (reply := replies.get(reply_id)) is not None:
                        reply.heard_s, reply.stalled_s = now_s, stalled_s
                        reply.stream.put(TokenFrame(offset, token_ids[at:end], text))
                    at = end
                continue
            if (reply := replies.get(event.reply_id)) is None:
                continue
            reply.heard_s, reply.stalled_s = now_s, stalled_s
            if event.HasField("failure"):
                error = errors.from_proto(status_pb2.Status.FromString(event.failure))
                reply.stream.fail(WorkerError(error))
            elif event.event.HasField("tokens"):
                reply.stream.put(common.frame_from_proto(event.event.tokens))
            else:
                reply.stream.put(event.event)

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


class WorkerError(Exception):
    """The worker has ended a reply with an error of its own."""

    def __init__(self, error: PenstockError) -> None:
        self.error = error


class MultiplexerPool(AbstractAsyncContextManager["MultiplexerPool"]):
    """Sessions by address, as long as the context lasts; one that is over is begun anew."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels
        self._sessions: dict[str, ReplyMultiplexer] = {}
        self._stalls = StallMonitor()
        self._watch = SilenceWatch(self._stalls)

    async def __aenter__(self) -> "MultiplexerPool":
        await self._stalls.__aenter__()
        return self

    def get(self, address: str) -> ReplyMultiplexer:
        session = self._sessions.get(address)
        if session is None or session.over:
            self._sessions = {a: s for a, s in self._sessions.items() if not s.over}
            session = self._sessions[address] = ReplyMultiplexer(self._channels.get(address), self._watch)
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
