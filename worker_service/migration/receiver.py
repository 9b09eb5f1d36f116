"""Receives requests: runs the target's state machine over an engine, the stream of a source and that of a router."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from penstock.services.background import end
from penstock.services.domain.errors import AlreadyRunning, Overloaded, PenstockError, Unavailable
from penstock.services.event_streams import OnTokens
from penstock.types.requests import GenerationRequest
from penstock.types.workers import (
    ChunkReceived,
    Declined,
    KvChunk,
    KvLayout,
    ToSource,
    ToTarget,
    TransferAccepted,
    TransferCommitted,
    TransferFailed,
    TransferOpening,
)
from penstock.worker_service.engine.interface import Blocks, EngineEvent, KvTransferring, LastBlocks, blocks_from
from penstock.worker_service.migration import target
from penstock.worker_service.migration.segment import TargetSegment, content, opened
from penstock.worker_service.migration.sender import MAX_TRANSFER_S, next_event

_log = logging.getLogger(__name__)

AWAIT_S = MAX_TRANSFER_S
"""An expected request whose source does not call within this time fails. A starving request waits at its source for the whole
transfer ahead of it; a source or router that is lost meanwhile ends the router's stream, and the expectation with it."""

_Entered = tuple[EngineEvent, AsyncGenerator[EngineEvent, None]]


class IncomingReply:
    """A reply that a router expects here: its stream waits for the request to arrive, then carries it."""

    def __init__(
        self, engine: KvTransferring, transfer_id: str, request: GenerationRequest, on_tokens: OnTokens | None
    ) -> None:
        self._engine, self.transfer_id, self._request = engine, transfer_id, request
        self._on_tokens = on_tokens
        self._phase = target.TargetPhase.AWAITING
        self.inbox: asyncio.Queue[target.TargetEvent] = asyncio.Queue()
        self._opened = asyncio.Event()
        self._entered: asyncio.Future[_Entered] = asyncio.get_running_loop().create_future()
        self._taken = False
        self._preparing: asyncio.Task[None] | None = None
        self._segment: TargetSegment | None = None
        self.answers: asyncio.Queue[ToSource | None] = asyncio.Queue()
        """Messages to the source; None: the end."""

    @property
    def waiting(self) -> bool:
        """Whether the request has not arrived yet."""
        return self._phase is not target.TargetPhase.RUNNING

    async def events(self) -> AsyncGenerator[EngineEvent, None]:
        """The events of the reply from the hand-over on. Leaving the iteration aborts it.

        Raises:
            Unavailable: The request did not arrive.
        """
        try:
            async with asyncio.timeout(AWAIT_S):
                await self._opened.wait()
        except TimeoutError:
            raise Unavailable("no transfer came") from None
        admitted, events = await asyncio.shield(self._entered)
        self._taken = True
        async with aclosing(events):
            yield admitted
            async for event in events:
                yield event

    def open(self) -> bool:
        """Handle the call of a source; False if another one has called already."""
        called = self._opened.is_set()
        self._opened.set()
        return not called

    async def lost(self) -> None:
        """Handle the end of the router's stream."""
        self.inbox.put_nowait(target.RouterLost())
        if self._entered.done() and not self._entered.cancelled() and self._entered.exception() is None:
            if not self._taken:
                await self._entered.result()[1].aclose()
        else:
            self._entered.cancel()

    async def drive(self, opening: TransferOpening) -> None:
        """Run the state machine until the request runs here or is dropped."""
        follow_ups: deque[target.TargetEvent] = deque([opening])
        try:
            while self._phase not in (target.TargetPhase.RUNNING, target.TargetPhase.DROPPED):
                if self._entered.cancelled():  # the loss of the router precedes other events
                    follow_ups.appendleft(target.RouterLost())
                event = follow_ups.popleft() if follow_ups else await next_event(self.inbox, target.SourceLost())
                self._phase, effects = target.advance(self._phase, event)
                for effect in effects:
                    try:
                        follow_up = await self._perform(effect, opening.layout)
                    except (PenstockError, ValueError) as error:
                        follow_up = target.Refused(str(error))
                    if follow_up is not None:
                        follow_ups.append(follow_up)
        except Exception:
            _log.exception("receiving %s failed", self.transfer_id)
            self.answers.put_nowait(TransferFailed("internal error"))
            await self._release()
        finally:
            self._segment = None
            if self._preparing is not None:
                await end(self._preparing)
            if not self._entered.done():
                self._entered.set_exception(Unavailable("the transfer failed"))
            self.answers.put_nowait(None)

    async def _perform(self, effect: target.TargetEffect, layout: KvLayout) -> target.TargetEvent | None:
        engine, name = self._engine, self.transfer_id
        match effect:
            case target.Reserve(opening):
                present = await engine.reserve(name, layout, opening.tokens, self._request.cache_salt)
                self._segment = opened(opening.shared)
                self._preparing = asyncio.create_task(engine.prepare_entry(name, self._request))
                # An error is raised where the result is needed; a request that is dropped before needs none.
                self._preparing.add_done_callback(lambda task: task.cancelled() or task.exception())
                self.answers.put_nowait(TransferAccepted(present, self._segment is not None))
            case target.Write(chunk):
                await engine.write_kv(name, chunk.first_block, self._blocks(chunk, layout))
                self.answers.put_nowait(ChunkReceived(chunk.blocks))
            case target.Enter(closing):
                assert self._preparing is not None
                await self._preparing
                last = None
                if closing.last is not None:
                    last = LastBlocks(closing.last.first_block, self._blocks(closing.last, layout))
                self._events = engine.enter(name, self._request, closing.tokens, last, self._on_tokens)
                self._admitted = await anext(self._events)
                if isinstance(self._admitted, Declined):
                    await self._events.aclose()
                    raise Unavailable(self._admitted.reason)
                return target.Entered()
            case target.TellCommitted():
                self._entered.set_result((self._admitted, self._events))
                self.answers.put_nowait(TransferCommitted())
            case TransferFailed():
                self.answers.put_nowait(effect)
            case target.EndReply(reason):
                if not self._entered.done():
                    self._entered.set_exception(Unavailable(reason))
            case target.Release():
                await self._release()
            case target.Abort():
                await self._events.aclose()
        return None

    def _blocks(self, chunk: KvChunk, layout: KvLayout) -> Blocks:
        return blocks_from(layout, content(chunk, layout, self._segment), chunk.blocks)

    async def _release(self) -> None:
        if self._preparing is not None:
            await end(self._preparing)  # it keeps nothing after the release
        await self._engine.release(self.transfer_id)


class KvReceiver:
    """Receives requests with their KV from other workers, at most `max_transfers` at once."""

    def __init__(self, engine: KvTransferring, max_transfers: int) -> None:
        self._engine, self._max_transfers = engine, max_transfers
        self._incoming: dict[str, IncomingReply] = {}
        self._drivers: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def expect(
        self, transfer_id: str, request: GenerationRequest, on_tokens: OnTokens | None = None
    ) -> AsyncGenerator[IncomingReply, None]:
        """Wait for a request as long as the context lasts. on_tokens: takes its frames, as in `Engine.generate`.

        Raises:
            AlreadyRunning: A transfer with this id is expected already.
            Overloaded: `max_transfers` are expected already.
        """
        if transfer_id in self._incoming:
            raise AlreadyRunning(transfer_id)
        if sum(1 for incoming in self._incoming.values() if incoming.waiting) >= self._max_transfers:
            raise Overloaded(f"{self._max_transfers} transfers are already active here", 0.5)
        incoming = self._incoming[transfer_id] = IncomingReply(self._engine, transfer_id, request, on_tokens)
        try:
            yield incoming
        finally:
            del self._incoming[transfer_id]
            await incoming.lost()

    async def receive(self, messages: AsyncIterator[ToTarget]) -> AsyncGenerator[ToSource, None]:
        """Yield messages to a source, until the request runs here or is refused."""
        opening = await anext(messages, None)
        if not isinstance(opening, TransferOpening):
            yield TransferFailed("the first message must be an opening")
            return
        incoming = self._incoming.get(opening.transfer_id)
        if incoming is None or not incoming.open():
            yield TransferFailed(f"no router expects transfer '{opening.transfer_id}' here")
            return
        driver = asyncio.create_task(incoming.drive(opening), name=f"receive {opening.transfer_id}")
        self._drivers.add(driver)  # continues after the loss of a source
        driver.add_done_callback(self._drivers.discard)
        pump = asyncio.create_task(self._pump(messages, incoming))
        try:
            while (message := await incoming.answers.get()) is not None:
                yield message
        finally:
            await end(pump)
            incoming.inbox.put_nowait(target.SourceLost())

    async def close(self) -> None:
        await end(*self._drivers)

    @staticmethod
    async def _pump(messages: AsyncIterator[ToTarget], incoming: IncomingReply) -> None:
        try:
            async for message in messages:
                incoming.inbox.put_nowait(message)
        finally:
            incoming.inbox.put_nowait(target.SourceLost())
