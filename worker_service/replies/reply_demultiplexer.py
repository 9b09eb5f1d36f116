"""Serves many replies over one call, with events of several replies in one message.

The router's end of the call is `router_service/clients/reply_multiplexer.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from functools import partial

from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.services import proto_codec as common
from penstock.services.background import end
from penstock.services.channels import MAX_MESSAGE_BYTES
from penstock.services.domain.errors import DeadlineExceeded, MessageTooLarge, invalid
from penstock.services.interceptors import CallRecorder
from penstock.types.replies import TokenFrame
from penstock.worker_service import proto_codec as codec
from penstock.worker_service.replies.replies import ReplyWriter
from penstock.worker_service.replies.token_columns import TokenColumns

METHOD = "penstock.worker.v1.WorkerService/Generate"  # the name of a reply in traces and metrics
ADMITTED_DELAY_S = 0.005  # how long an `admitted` event waits for others, while the engine has work to do
UNSTREAMED_ADMITTED_DELAY_S = 0.05
"""The same if the reply's caller lets its tokens wait: usually until the first tokens, which saves it a message per reply."""
MAX_EVENTS = 256  # per message; token columns count as one
MAX_BYTES = 1 << 20  # per message; a larger event is a message of its own
MAX_EVENT_BYTES = MAX_MESSAGE_BYTES - 64  # the rest of a message with one event has less than 64 bytes

Serve = Callable[[pb.GenerateRequest, ReplyWriter], Coroutine[None, None, pb.GenerateResponse]]
"""Serves one request and returns its terminal event."""


class _Writer:
    """Adds the events of one reply to the messages of its call."""

    __slots__ = ("_admitted_delay_s", "_session", "reply_id")

    def __init__(self, session: "ReplyDemultiplexer", reply_id: int, *, streamed: bool) -> None:
        self._session, self.reply_id = session, reply_id
        self._admitted_delay_s = ADMITTED_DELAY_S if streamed else UNSTREAMED_ADMITTED_DELAY_S

    def tokens(self, frame: TokenFrame) -> None:
        if frame.logprobs:
            self.event(codec.event_to_proto(frame))
        else:
            self._session.send_tokens(self.reply_id, frame)

    def event(self, event: pb.GenerateResponse) -> None:
        delay_s = self._admitted_delay_s if event.HasField("admitted") else 0.0
        self._session.send(pb.ReplyEvent(reply_id=self.reply_id, event=event), delay_s)


class ReplyDemultiplexer:
    """One call of GenerateMany.

    While a message is being sent, events for the next one are collected, so a busier call has larger messages. Tokens wait
    for nothing else.
    """

    def __init__(self, serve: Serve, calls: CallRecorder, draining: asyncio.Event) -> None:
        self._serve_reply, self._calls, self._draining = serve, calls, draining
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outgoing: deque[tuple[pb.ReplyEvent, int] | TokenColumns] = deque()  # events with their size in bytes
        self._columns: TokenColumns | None = None  # the last ones in `_outgoing`
        self._behind: set[int] = set()  # replies with an event after these columns: their tokens go into new columns
        self._wake = asyncio.Event()

    async def run(
        self, requests: AsyncIterator[pb.GenerateManyRequest]
    ) -> AsyncGenerator[pb.GenerateManyResponse, None]:
        """Yield messages until the caller ends the call, or until the worker drains and no reply is left.

        Raises:
            InvalidRequest: A message violates the protocol.
        """
        reader = asyncio.create_task(self._follow(requests))
        reader.add_done_callback(lambda _: self._wake.set())
        drain = asyncio.create_task(self._draining.wait())
        drain.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outgoing:
                    yield pb.GenerateManyResponse(events=self._next())
                if reader.done():
                    reader.result()
                if not self._tasks and (reader.done() or self._draining.is_set()):
                    return
        finally:
            await end(reader, drain, *self._tasks.values())

    def send_tokens(self, reply_id: int, frame: TokenFrame) -> None:
        """Queue a frame, in columns with those of other replies.

        Raises:
            MessageTooLarge: gRPC would end the call with all its replies.
        """
        size = TokenColumns.row_bytes(frame)
        columns = self._columns
        if columns is None or reply_id in self._behind or columns.bytes + size > MAX_BYTES:
            if size > MAX_EVENT_BYTES:
                raise MessageTooLarge.by("output", size, MAX_EVENT_BYTES)
            columns = self._columns = TokenColumns()
            self._outgoing.append(columns)
            self._behind.clear()
        columns.add(reply_id, frame, size)
        self._wake.set()

    def send(self, event: pb.ReplyEvent, delay_s: float = 0.0) -> None:
        """Queue an event. delay_s: how long it may wait for others.

        Raises:
            MessageTooLarge: As in `send_tokens`.
        """
        if (size := event.ByteSize()) > MAX_EVENT_BYTES:
            raise MessageTooLarge.by("sampling.top_logprobs", size, MAX_EVENT_BYTES)
        self._outgoing.append((event, size))
        self._behind.add(event.reply_id)
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._wake.set)
        else:
            self._wake.set()

    def _next(self) -> list[pb.ReplyEvent]:
        """Remove and return the queued events for the next message, at least one."""
        events, room = list[pb.ReplyEvent](), MAX_BYTES
        while self._outgoing and len(events) < MAX_EVENTS:
            item = self._outgoing[0]
            room -= item.bytes if isinstance(item, TokenColumns) else item[1]
            if events and room < 0:
                break
            self._outgoing.popleft()
            if item is self._columns:
                self._columns = None
                self._behind.clear()
            events.append(item.event if isinstance(item, TokenColumns) else item[0])
        return events

    async def _follow(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> None:
        last_id = 0
        async for message in requests:
            if not message.steps:
                raise invalid("steps", "must not be empty")
            for step in message.steps:
                match step.WhichOneof("step"):
                    case "start":
                        if step.reply_id <= last_id:
                            problem = f"must increase with each start; the last one was {last_id}"
                            raise invalid("steps.reply_id", problem)
                        last_id = step.reply_id
                        task = asyncio.create_task(self._serve(step.reply_id, step.start))
                        self._tasks[step.reply_id] = task
                        task.add_done_callback(partial(self._ended, step.reply_id))
                        await asyncio.sleep(0)  # this one reaches the engine while the next one starts
                    case "cancel":
                        if (running := self._tasks.get(step.reply_id)) is not None:
                            running.cancel()
                    case _:
                        raise invalid("steps.step", "start or cancel must be set")

    def _ended(self, reply_id: int, _: asyncio.Task[None]) -> None:
        del self._tasks[reply_id]
        self._wake.set()

    async def _serve(self, reply_id: int, start: pb.StartReply) -> None:
        call = self._calls.begin(METHOD, start.trace_context)
        writer = _Writer(self, reply_id, streamed=not start.request.HasField("output_interval"))
        with call.span() as span:
            try:
                async with asyncio.timeout(
                    common.seconds(start.timeout) if start.HasField("timeout") else None
                ) as limit:
                    terminal = await self._serve_reply(start.request, writer)
                self.send(pb.ReplyEvent(reply_id=reply_id, event=terminal))
                call.end("OK")
            except BaseException as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    error = DeadlineExceeded("the reply's timeout has passed")
                status = call.failed(error, span)
                if status is None:
                    raise
                self.send(pb.ReplyEvent(reply_id=reply_id, failure=status.SerializeToString()))


class SingleReply:
    """One reply over a separate call."""

    def __init__(self, serve: Serve, request: pb.GenerateRequest) -> None:
        self._serve, self._request = serve, request
        self._events: asyncio.Queue[pb.GenerateResponse | None] = asyncio.Queue()

    async def events(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yield all events. Leaving the iteration ends the reply.

        Raises:
            PenstockError: The error of the reply.
        """
        task = asyncio.create_task(self._serve(self._request, self))
        task.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            while (event := await self._events.get()) is not None:
                yield event
            yield task.result()
        finally:
            await end(task)

    def tokens(self, frame: TokenFrame) -> None:
        self._events.put_nowait(codec.event_to_proto(frame))

    def event(self, event: pb.GenerateResponse) -> None:
        self._events.put_nowait(event)
