"""Takes requests in: does what the target's state machine says, over an engine, a source's stream and a router's."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

from services.background import end
from services.domain.errors import AlreadyRunning, Overloaded, PenstockError, Unavailable
from services.domain.requests import GenerationRequest
from services.event_streams import OnTokens
from worker_service.engine.interface import EngineEvent, KvTransferring, LastBlocks
from worker_service.migration import source, target
from worker_service.migration.messages import Chunk, Closing, Opening, ToSource, ToTarget
from worker_service.migration.sender import ANSWER_S, MAX_TRANSFERS

_log = logging.getLogger(__name__)

AWAIT_S = 2.0  # a claim that no source calls for ends after so long: the router calls the source as soon as it has one

_Entered = tuple[EngineEvent, AsyncGenerator[EngineEvent, None]]


class Claim:
    """A router's stream that waits for a request, then carries it."""

    def __init__(
        self, engine: KvTransferring, transfer_id: str, request: GenerationRequest, on_tokens: OnTokens | None
    ) -> None:
        self._engine, self.transfer_id, self._request = engine, transfer_id, request
        self._on_tokens = on_tokens
        self._phase = target.TargetPhase.AWAITING
        self._inbox: asyncio.Queue[target.TargetEvent | ToTarget] = asyncio.Queue()
        self._opened = asyncio.Event()
        self._entered: asyncio.Future[_Entered] = asyncio.get_running_loop().create_future()
        self._taken = False
        self.answers: asyncio.Queue[ToSource | None] = asyncio.Queue()
        """For the source; None is the end."""

    @property
    def waiting(self) -> bool:
        """Whether the request is not here yet."""
        return self._phase is not target.TargetPhase.RUNNING

    async def events(self) -> AsyncGenerator[EngineEvent, None]:
        """The reply from hand-over on. Unavailable if the request does not come. Leaving the iteration aborts it."""
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
        """A source calls; False if one has already."""
        if self._opened.is_set():
            return False
        self._opened.set()
        self._inbox.put_nowait(target.Opened())
        return True

    def tell(self, event: target.TargetEvent | ToTarget) -> None:
        self._inbox.put_nowait(event)

    async def lost(self) -> None:
        """The router's stream has ended."""
        self._inbox.put_nowait(target.ClaimLost())
        if self._entered.done() and not self._entered.cancelled() and self._entered.exception() is None:
            if not self._taken:
                await self._entered.result()[1].aclose()
        else:
            self._entered.cancel()

    async def drive(self, opening: Opening) -> None:
        """Until the request runs here or is dropped."""
        follow_ups: deque[target.TargetEvent] = deque()
        said: ToTarget = opening
        try:
            while self._phase not in (target.TargetPhase.RUNNING, target.TargetPhase.DROPPED):
                if self._entered.cancelled():  # the claim goes before whatever else has happened
                    follow_ups.appendleft(target.ClaimLost())
                event = follow_ups.popleft() if follow_ups else await self._next()
                match event:
                    case Chunk():
                        said, event = event, target.ChunkCame(event.blocks)
                    case Closing():
                        said, event = event, target.Closed()
                    case Opening():
                        event = target.Refused("opened twice")
                self._phase, effects = target.advance(self._phase, event)
                for effect in effects:
                    try:
                        follow_up = await self._perform(effect, opening, said)
                    except (PenstockError, ValueError) as error:
                        follow_up = target.Refused(str(error))
                    if follow_up is not None:
                        follow_ups.append(follow_up)
        except Exception:
            _log.exception("receiving %s failed", self.transfer_id)
            self.answers.put_nowait(source.Failed("internal error"))
            await self._engine.release(self.transfer_id)
        finally:
            if not self._entered.done():
                self._entered.set_exception(Unavailable("the transfer failed"))
            self.answers.put_nowait(None)

    async def _next(self) -> target.TargetEvent | ToTarget:
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                return await self._inbox.get()
        return target.SourceLost()

    async def _perform(
        self, effect: target.TargetEffect, opening: Opening, said: ToTarget
    ) -> target.TargetEvent | None:
        engine, name = self._engine, self.transfer_id
        match effect:
            case target.Reserve():
                return target.Reserved(await engine.reserve(name, opening.layout, opening.tokens))
            case target.Write():
                assert isinstance(said, Chunk)
                await engine.write_kv(name, said.first_block, opening.layout.blocks_from(said.data, said.blocks))
                return target.Written(said.blocks)
            case target.Enter():
                assert isinstance(said, Closing)
                last = None
                if said.last is not None:
                    data = opening.layout.blocks_from(said.last.data, said.last.blocks)
                    last = LastBlocks(said.last.first_block, data)
                self._events = engine.enter(name, self._request, said.tokens, last, self._on_tokens)
                self._admitted = await anext(self._events)
                return target.Entered()
            case target.TellCommitted():
                self._entered.set_result((self._admitted, self._events))
                self.answers.put_nowait(source.Committed())
            case target.TellAccepted(present):
                self.answers.put_nowait(source.Accepted(present))
            case target.TellReceived(blocks):
                self.answers.put_nowait(source.Received(blocks))
            case target.TellRefused(reason):
                self.answers.put_nowait(source.Failed(reason))
            case target.EndClaim(reason):
                if not self._entered.done():
                    self._entered.set_exception(Unavailable(reason))
            case target.Release():
                await engine.release(name)
            case target.Abort():
                await self._events.aclose()
        return None


class Receiver:
    """Requests on their way into one engine, at most MAX_TRANSFERS at once."""

    def __init__(self, engine: KvTransferring) -> None:
        self._engine = engine
        self._claims: dict[str, Claim] = {}
        self._drivers: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def claim(
        self, transfer_id: str, request: GenerationRequest, on_tokens: OnTokens | None = None
    ) -> AsyncGenerator[Claim, None]:
        """Wait for a request as long as the context lasts. on_tokens: takes its frames, as in `Engine.generate`.

        Raises:
            AlreadyRunning: The transfer is waited for already.
            Overloaded: MAX_TRANSFERS wait already.
        """
        if transfer_id in self._claims:
            raise AlreadyRunning(transfer_id)
        if sum(1 for claim in self._claims.values() if claim.waiting) >= MAX_TRANSFERS:
            raise Overloaded(f"{MAX_TRANSFERS} transfers are under way here", 0.5)
        claim = self._claims[transfer_id] = Claim(self._engine, transfer_id, request, on_tokens)
        try:
            yield claim
        finally:
            del self._claims[transfer_id]
            await claim.lost()

    async def receive(self, messages: AsyncIterator[ToTarget]) -> AsyncGenerator[ToSource, None]:
        """Answers to a source's messages, until the request runs here or is refused."""
        opening = await anext(messages, None)
        if not isinstance(opening, Opening):
            yield source.Failed("the first message must be the opening")
            return
        claim = self._claims.get(opening.transfer_id)
        if claim is None or not claim.open():
            yield source.Failed(f"nobody waits here for transfer '{opening.transfer_id}'")
            return
        driver = asyncio.create_task(claim.drive(opening), name=f"receive {opening.transfer_id}")
        self._drivers.add(driver)  # it outlives a source that is lost
        driver.add_done_callback(self._drivers.discard)
        pump = asyncio.create_task(self._pump(messages, claim))
        try:
            while (answer := await claim.answers.get()) is not None:
                yield answer
        finally:
            await end(pump)
            claim.tell(target.SourceLost())

    async def close(self) -> None:
        await end(*self._drivers)

    @staticmethod
    async def _pump(messages: AsyncIterator[ToTarget], claim: Claim) -> None:
        try:
            async for message in messages:
                claim.tell(message)
        finally:
            claim.tell(target.SourceLost())
