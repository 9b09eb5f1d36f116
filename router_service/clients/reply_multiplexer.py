"""The router's call to one worker, shared by all its replies there.

The worker's end of the call is `worker_service/replies/reply_demultiplexer.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc import aio

from penstock.mapper import write_time
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.router_service.domain.failures import Failure, InstanceFailed
from penstock.services import errors
from penstock.services import proto_codec as common
from penstock.services.background import BackgroundWork, Works
from penstock.services.channels import MAX_MESSAGE_BYTES, ChannelPool
from penstock.services.domain.errors import DeadlineExceeded, MessageTooLarge
from penstock.services.event_streams import OnTokens
from penstock.services.stalls import Listener, SilenceWatch, StallMonitor
from penstock.types.replies import TokenFrame

MAX_JOINED_BYTES = 1 << 20  # of several requests in one message; a larger request is sent in a message of its own
TERMINAL = frozenset({"finished", "handed_over"})
MAX_STEP_BYTES = MAX_MESSAGE_BYTES - 64  # the other fields of a message with one step take less than 64 bytes

OnEvent = Callable[[pb.GenerateResponse], None]
"""Takes the events of a reply except frames of tokens and the terminal event, in order, on the event loop."""


class _Reply(Listener):
    """An active reply.

    ended: its terminal event or its error. sent: its request has been sent to the worker. over_there: the worker ended it.
    """

    __slots__ = ("_on_event", "_on_tokens", "ended", "over_there", "sent")

    def __init__(self, silence_s: float, deadline_s: float, on_event: OnEvent, on_tokens: OnTokens) -> None:
        super().__init__(silence_s, deadline_s)
        self._on_event, self._on_tokens = on_event, on_tokens
        self.ended: asyncio.Future[pb.GenerateResponse] = asyncio.get_running_loop().create_future()
        self.sent = self.over_there = False

    def tokens(self, frame: TokenFrame) -> None:
        """Pass a frame on. An exception of the callback ends this reply only."""
        if not self.ended.done():
            try:
                self._on_tokens(frame)
            except Exception as error:
                self.fail(error)

    def event(self, event: pb.GenerateResponse) -> None:
        """Pass an event on, or end with it."""
        if self.ended.done():
            return
        kind = event.WhichOneof("event")
        if kind in TERMINAL:
            self.over_there = True
            self.ended.set_result(event)
            return
        try:
            if kind == "tokens":
                self._on_tokens(common.frame_from_proto(event.tokens))
            else:
                self._on_event(event)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with an error. Only the first end counts."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def on_silence(self) -> None:
        failure = Failure.SILENT if self.sent else Failure.CONNECT_FAILED
        self.fail(InstanceFailed(failure, f"the worker was silent for {self.silence_s:g} s"))

    def on_deadline(self) -> None:
        self.fail(DeadlineExceeded("the deadline passed"))


class ReplyMultiplexer:
    """One call of GenerateMany, from its first reply to its end; `over` after that."""

    def __init__(self, channel: aio.Channel, watch: SilenceWatch) -> None:
        self.channel = channel
        self._watch, self._loop = watch, asyncio.get_running_loop()
        self._steps: deque[pb.ReplyStep] = deque()
        self._wake = asyncio.Event()
        self._replies: dict[int, _Reply] = {}
        self._last_id = 0
        self.over = False
        self._task = asyncio.create_task(self._read(channel))

    @property
    def replies(self) -> int:
        """Number of active replies."""
        return len(self._replies)

    async def close(self) -> None:
        """End the call and with it every reply."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def reply(
        self,
        write_request: Callable[[pb.GenerateRequest], None],
        timeout_s: float,
        trace_context: Mapping[str, str],
        silence_s: float,
        on_event: OnEvent,
        on_tokens: OnTokens,
    ) -> pb.GenerateResponse:
        """Have the worker serve one request; return its terminal event.

        write_request: writes the request into an empty message.
        on_event, on_tokens: called with all events before it, in order, by the task that reads the call. They must not block.
        What they raise ends the reply. Cancelling cancels the reply at the worker.

        Raises:
            PenstockError: The worker's error.
            InstanceFailed: There is no connection, it broke, the shared call ended, or nothing arrived for `silence_s`,
                not counting stalls of this process.
            MessageTooLarge: The request does not fit a message; nothing has been sent.
            DeadlineExceeded: `timeout_s` has passed, whatever the worker does.
        """
        deadline_s = self._loop.time() + timeout_s
        self._last_id += 1
        reply_id = self._last_id
        step = pb.ReplyStep(reply_id=reply_id)
        start = step.start
        write_request(start.request)
        write_time(max(0.0, timeout_s), start.timeout)
        if trace_context:  # to write an empty map takes as long as the request
            start.trace_context.update(trace_context)
        if (size := step.ByteSize()) > MAX_STEP_BYTES:  # gRPC would end the call for it, with all its replies
            raise MessageTooLarge.by("prompt", size, MAX_STEP_BYTES)
        reply = self._replies[reply_id] = _Reply(silence_s, deadline_s, on_event, on_tokens)
        self._watch.begin(reply)
        self._send(step)
        try:
            return await reply.ended
        except asyncio.CancelledError:
            if reply.ended.done() and not reply.ended.cancelled():
                reply.ended.exception()  # retrieved: otherwise asyncio would log an error that no longer matters
            raise
        finally:
            self._watch.end(reply)
            del self._replies[reply_id]
            if not reply.over_there and not self.over:
                self._send(pb.ReplyStep(reply_id=reply_id, cancel=pb.CancelReply()))

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
            self._wake.set()  # a call that ends by itself leaves the task that sends waiting
            for reply in self._replies.values():
                unsent = failure is Failure.INSTANCE_DIED and not reply.sent
                reply.fail(InstanceFailed(Failure.CONNECT_FAILED if unsent else failure, why))

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
                        reply.tokens(TokenFrame(offset, token_ids[at:end], text))
                    at = end
                continue
            if (reply := replies.get(event.reply_id)) is None:
                continue
            reply.heard_s, reply.stalled_s = now_s, stalled_s
            if event.HasField("failure"):
                reply.over_there = True
                reply.fail(errors.from_proto(status_pb2.Status.FromString(event.failure)))
            else:
                reply.event(event.event)

    def _send(self, step: pb.ReplyStep) -> None:
        self._steps.append(step)
        self._wake.set()

    async def _outgoing(self) -> AsyncIterator[pb.GenerateManyRequest]:
        """Messages with the steps that were queued while the previous one was sent, up to MAX_JOINED_BYTES each."""
        while not self.over:
            await self._wake.wait()
            self._wake.clear()
            while self._steps:
                steps = [self._steps.popleft()]
                room = MAX_JOINED_BYTES - steps[0].ByteSize()
                while self._steps and (room := room - self._steps[0].ByteSize()) >= 0:
                    steps.append(self._steps.popleft())
                yield pb.GenerateManyRequest(steps=steps)
                # gRPC asks for the next message when this one is being sent, which is not before there is a connection.
                for step in steps:
                    if (reply := self._replies.get(step.reply_id)) is not None:
                        reply.sent = True


class MultiplexerPool(BackgroundWork):
    """Multiplexers by address, as long as the context lasts; one whose call has ended is replaced."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels
        self._multiplexers: dict[str, ReplyMultiplexer] = {}
        self._replaced: list[ReplyMultiplexer] = []
        self._stalls = StallMonitor()
        self._watch = SilenceWatch(self._stalls)

    def work(self) -> Works:
        return self._stalls.work()

    def get(self, address: str) -> ReplyMultiplexer:
        """The multiplexer of a worker."""
        multiplexer, channel = self._multiplexers.get(address), self._channels.get(address)
        if multiplexer is None or multiplexer.over or multiplexer.channel is not channel:
            if multiplexer is not None:  # new certificates: its replies continue on the old channel
                self._replaced = [m for m in (*self._replaced, multiplexer) if not m.over]
            self._multiplexers = {a: m for a, m in self._multiplexers.items() if not m.over}
            multiplexer = self._multiplexers[address] = ReplyMultiplexer(channel, self._watch)
        return multiplexer

    def in_use(self) -> set[str]:
        """Addresses with active replies."""
        return {address for address, m in self._multiplexers.items() if m.replies and not m.over}

    async def __aexit__(self, *_: object) -> None:
        for multiplexer in (*self._multiplexers.values(), *self._replaced):
            await multiplexer.close()
        await super().__aexit__()
