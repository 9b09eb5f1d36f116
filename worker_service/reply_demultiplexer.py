"""Many replies over one call: what several have to say at the same time leaves in one message.

The router's end of the call is `router_service/clients/reply_multiplexer.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

from penstock.proto.worker.v1 import worker_pb2 as pb
from services import proto_codec as common
from services.background import end
from services.channels import MAX_MESSAGE_BYTES
from services.domain.errors import DeadlineExceeded, MessageTooLarge, invalid
from services.interceptors import CallRecorder

METHOD = "penstock.worker.v1.WorkerService/Generate"  # what each reply is, in traces and metrics
UNHURRIED_S = 0.005  # how long the word that a request is admitted waits for company: the engine has work to do then
MOST_EVENTS = 256  # in one message
MOST_BYTES = 1 << 20  # in one message; an event that is larger has a message to itself
MAX_EVENT_BYTES = MAX_MESSAGE_BYTES - 64  # what surrounds an event in a message of its own takes less than 64 bytes

Reply = Callable[[pb.GenerateRequest], AsyncGenerator[pb.GenerateResponse, None]]


class ReplyDemultiplexer:
    """One call of GenerateMany.

    While a message is being sent the next one fills: the busier the call, the fewer its messages. No token waits for more.
    """

    def __init__(self, reply: Reply, calls: CallRecorder, draining: asyncio.Event) -> None:
        self._reply, self._calls, self._draining = reply, calls, draining
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._said: deque[tuple[pb.ReplyEvent, int]] = deque()  # with its size in bytes
        self._news = asyncio.Event()

    async def run(self, asked: AsyncIterator[pb.GenerateManyRequest]) -> AsyncGenerator[pb.GenerateManyResponse, None]:
        """Messages until the caller ends the call, or the worker drains and no reply is left. InvalidRequest."""
        reader = asyncio.create_task(self._follow(asked))
        reader.add_done_callback(lambda _: self._news.set())
        drain = asyncio.create_task(self._draining.wait())
        drain.add_done_callback(lambda _: self._news.set())
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._said:
                    yield pb.GenerateManyResponse(events=self._next())
                if reader.done():
                    reader.result()
                if not self._tasks and (reader.done() or self._draining.is_set()):
                    return
        finally:
            await end(reader, drain, *self._tasks.values())

    def _next(self) -> list[pb.ReplyEvent]:
        """What the next message says, out of what is to be said; at least one event."""
        event, size = self._said.popleft()
        events, room = [event], MOST_BYTES - size
        while self._said and len(events) < MOST_EVENTS and (room := room - self._said[0][1]) >= 0:
            events.append(self._said.popleft()[0])
        return events

    async def _follow(self, asked: AsyncIterator[pb.GenerateManyRequest]) -> None:
        seen = 0
        async for message in asked:
            if not message.steps:
                raise invalid("steps", "must not be empty")
            for step in message.steps:
                match step.WhichOneof("step"):
                    case "start":
                        if step.reply_id <= seen:
                            raise invalid("steps.reply_id", f"must grow from start to start; the last one was {seen}")
                        seen = step.reply_id
                        task = asyncio.create_task(self._serve(step.reply_id, step.start))
                        self._tasks[step.reply_id] = task
                        task.add_done_callback(partial(self._ended, step.reply_id))
                        await asyncio.sleep(0)  # one reaches the engine while the next one begins
                    case "cancel":
                        if (running := self._tasks.get(step.reply_id)) is not None:
                            running.cancel()
                    case _:
                        raise invalid("steps.step", "start or cancel must be set")

    def _ended(self, reply_id: int, _: asyncio.Task[None]) -> None:
        del self._tasks[reply_id]
        self._news.set()

    async def _serve(self, reply_id: int, start: pb.StartReply) -> None:
        call = self._calls.begin(METHOD, start.trace_context)
        with call.span() as span:
            try:
                terminal = None
                async with asyncio.timeout(
                    common.seconds(start.timeout) if start.HasField("timeout") else None
                ) as limit:
                    async with aclosing(self._reply(start.request)) as events:
                        async for event in events:
                            if event.WhichOneof("event") in ("finished", "handed_over"):
                                terminal = event
                            else:
                                self._say(pb.ReplyEvent(reply_id=reply_id, event=event))
                                await asyncio.sleep(0)  # it leaves first, then the books are kept
                if terminal is not None:  # told when all is over: the reply's place is free again
                    self._say(pb.ReplyEvent(reply_id=reply_id, event=terminal))
                call.end("OK")
            except BaseException as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    error = DeadlineExceeded("the reply's timeout has passed")
                status = call.failed(error, span)
                if status is None:
                    raise
                self._say(pb.ReplyEvent(reply_id=reply_id, failure=status.SerializeToString()))

    def _say(self, event: pb.ReplyEvent) -> None:
        """Have an event leave. MessageTooLarge: gRPC would end the call for it, with all replies on it."""
        if (size := event.ByteSize()) > MAX_EVENT_BYTES:
            raise MessageTooLarge.by("sampling.top_logprobs_count", size, MAX_EVENT_BYTES)
        self._said.append((event, size))
        if event.event.HasField("admitted"):
            asyncio.get_running_loop().call_later(UNHURRIED_S, self._news.set)
        else:
            self._news.set()
