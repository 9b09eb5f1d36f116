"""A reply's stream from workers that hand it on to each other while it runs."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from router_service.clients.worker_client import (
    RoundCopied,
    WorkerAdmitted,
    WorkerAlive,
    WorkerClient,
    WorkerEvent,
    WorkerFinished,
    WorkerHandedOver,
    WorkerNotMoved,
)
from router_service.domain.failures import Failure, InstanceFailed
from router_service.migration import moves
from router_service.migration.moves import MoveEffect, MoveEvent, Reading
from services.background import end
from services.domain.errors import AlreadyRunning, NotFound, Overloaded, PenstockError, Unavailable
from services.domain.instances import InstanceRecord
from services.domain.requests import FinishReason, GenerationRequest, TokenFrame
from services.event_streams import EventStream, OnTokens

_log = logging.getLogger(__name__)

MOVE_TIMEOUT_S = 120.0  # the longest a move may take

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """The reply goes on at the target from `offset` on. stall_s: as the source saw it, without the way to the client."""

    offset: int
    stall_s: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class NotMoved:
    """The reply goes on where it was, or has ended, or is computed anew elsewhere. The client sees every token once.

    busy: the source sends another request; this one may be tried again.
    """

    reason: str
    busy: bool = False


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """What comes next comes from another instance."""

    record: InstanceRecord
    why: str


class MovableReply:
    """One reply at one worker after the other; `events` is read by one reader, `move` may be called meanwhile."""

    def __init__(
        self,
        workers: WorkerClient,
        record: InstanceRecord,
        request: GenerationRequest,
        deadline_s: float,
        metadata: Metadata,
        on_failure: Callable[[InstanceRecord, PenstockError], None] = lambda _record, _error: None,
        may_move: Callable[[], bool] = lambda: True,
    ) -> None:
        """deadline_s: on the event loop's clock.

        on_failure: told of an instance that fails while the reply goes on at another: a move's source or target.
        may_move: asked before each move.
        """
        self._workers, self._request, self._metadata = workers, request, metadata
        self._deadline_s = deadline_s
        self._on_failure, self._may_move = on_failure, may_move
        self.record = record
        self._reading = Reading.AT_SOURCE
        self._on_tokens: OnTokens = _nobody_reads
        self._claim: _Claim | None = None
        self._claims: set[asyncio.Task[None]] = set()
        self._why = ""

    async def events(self, on_tokens: OnTokens) -> AsyncGenerator[WorkerEvent | WorkerChanged, None]:
        """The reply's events but tokens, WorkerChanged wherever it has moved; WorkerFinished is the last.

        on_tokens: takes the frames of whichever worker is read, each behind all events before it.

        Raises:
            PenstockError: The error of the worker that is read; Unavailable where it breaks off, goes silent or aborts.
        """
        self._on_tokens = on_tokens
        events = self._generate(self.record.address, self._pass_tokens)
        try:
            while True:
                async with aclosing(events):
                    try:
                        async for event in events:
                            if isinstance(event, WorkerHandedOver):
                                self._advance(MoveEvent.SOURCE_HANDED_OVER)
                                break
                            if isinstance(event, WorkerFinished):
                                if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                                    raise InstanceFailed(
                                        Failure.ABORTED, f"the worker ended the reply: {event.reason.value}"
                                    )
                                yield event
                                return
                            yield event
                    except (Unavailable, NotFound, AlreadyRunning, Overloaded) as error:
                        self._advance(MoveEvent.SOURCE_LOST)
                        if self._reading is Reading.ORPHANED and self._claim is not None:
                            here = await self._claim.admitted()
                            self._advance(MoveEvent.TARGET_ADMITTED if here else MoveEvent.TARGET_LOST)
                        if self._reading is not Reading.AT_TARGET:
                            raise
                        self._on_failure(self.record, error)
                claim, self._claim = self._claim, None
                if self._reading is not Reading.AT_TARGET or claim is None:
                    raise InstanceFailed(Failure.ABORTED, "the worker handed the reply over, but the target is gone")
                self.record, self._reading = claim.target, Reading.AT_SOURCE
                yield WorkerChanged(self.record, self._why)
                events = claim.events()
        finally:
            self._reading = Reading.LOST  # no move begins from here on
            await end(*self._claims)

    async def move(
        self,
        target: InstanceRecord,
        why: str,
        *,
        starving: bool = False,
        on_started: Callable[[], Awaitable[None]] | None = None,
    ) -> Moved | NotMoved:
        """Have the reply go on at `target`; return once it does, or will not.

        starving: the source sends it next, as soon as what it sends now has gone. on_started: called once it is being sent.
        """
        if self._reading is not Reading.AT_SOURCE or self._claim is not None:
            return NotMoved("it has ended or is moving already")
        if target.instance_id == self.record.instance_id:
            return NotMoved("it is there already")
        if not self._may_move():
            return NotMoved("instances died while they worked on it")
        transfer_id, source, sent_bytes = secrets.token_hex(8), self.record, 0
        self._why = why
        stream = EventStream[WorkerEvent](self._pass_tokens)
        events = self._generate(target.address, stream.put, transfer_id)
        claim = self._claim = _Claim(target, events, stream, lambda: self._target_lost(claim))
        self._claims.add(claim.task)
        claim.task.add_done_callback(self._claims.discard)
        self._advance(MoveEvent.BEGUN)
        told = False
        try:
            if not await claim.waits():
                return NotMoved(f"the target does not wait for it: {claim.error or 'the reply has ended'}")
            reports = self._workers.migrate_out(
                source.address,
                self._request.request_id,
                transfer_id,
                target.instance_id,
                starving=starving,
                timeout_s=min(MOVE_TIMEOUT_S, self._left_s()),
                metadata=self._metadata,
            )
            async with aclosing(reports):
                async for report in reports:
                    if on_started is not None and not (isinstance(report, WorkerNotMoved) and report.busy):
                        await on_started()
                        on_started = None
                    match report:
                        case RoundCopied():
                            sent_bytes = report.sent_bytes
                        case WorkerNotMoved():
                            told = True
                            self._advance(MoveEvent.MOVE_FAILED, claim)
                            return NotMoved(report.reason, report.busy)
                        case _:
                            told = True
                            return Moved(report.offset, report.stall_s, sent_bytes)
            return NotMoved("the source said nothing of how it ended")
        except PenstockError as error:
            return NotMoved(str(error))
        finally:
            if not told:
                self._advance(MoveEvent.WORD_BROKEN, claim)

    def _target_lost(self, claim: "_Claim") -> None:
        if claim is self._claim and claim.error is not None:  # it is not read yet: nobody else is told
            self._on_failure(claim.target, claim.error)
        self._advance(MoveEvent.TARGET_LOST, claim)

    def _advance(self, event: MoveEvent, of: "_Claim | None" = None) -> None:
        """of: the claim of the move that the event is of; once that is over it says nothing about the next one."""
        if of is not None and of is not self._claim:
            return
        self._reading, effects = moves.advance(self._reading, event)
        if MoveEffect.DROP_CLAIM in effects and self._claim is not None:
            self._claim.task.cancel()
            self._claim = None

    def _pass_tokens(self, frame: TokenFrame) -> None:
        """Take a frame of the worker that is read."""
        if self._reading is not Reading.AT_SOURCE:
            self._advance(MoveEvent.SOURCE_SPOKE)
        self._on_tokens(frame)

    def _generate(self, address: str, on_tokens: OnTokens, transfer_id: str = "") -> AsyncGenerator[WorkerEvent, None]:
        return self._workers.generate(
            address,
            self._request,
            timeout_s=self._left_s(),
            metadata=self._metadata,
            transfer_id=transfer_id,
            on_tokens=on_tokens,
        )

    def _left_s(self) -> float:
        return max(0.001, self._deadline_s - asyncio.get_running_loop().time())


def _nobody_reads(_: TokenFrame) -> None:
    raise AssertionError("tokens of a reply that is not read")


class _Claim:
    """The stream at a target, kept open from before the move on; its events wait in `stream` until they are read."""

    def __init__(
        self,
        target: InstanceRecord,
        events: AsyncGenerator[WorkerEvent, None],
        stream: EventStream[WorkerEvent],
        on_lost: Callable[[], None],
    ) -> None:
        """events: without their tokens, which `stream` has taken already."""
        self.target = target
        self.error: PenstockError | None = None
        self._source, self._stream, self._on_lost = events, stream, on_lost
        loop = asyncio.get_running_loop()
        self._waits: asyncio.Future[bool] = loop.create_future()
        self._admitted: asyncio.Future[bool] = loop.create_future()
        self.task = asyncio.create_task(self._pump(), name=f"claim at {target.instance_id}")

    async def waits(self) -> bool:
        """Return once the target waits for the transfer; False if it does not."""
        return await asyncio.shield(self._waits)

    async def admitted(self) -> bool:
        """Return once the target runs the request; False if it will not."""
        return await asyncio.shield(self._admitted)

    async def events(self) -> AsyncGenerator[WorkerEvent, None]:
        """To the end; leaving the iteration ends the stream."""
        try:
            while True:
                event = await self._stream.get()
                yield event
                if isinstance(event, (WorkerFinished, WorkerHandedOver)):
                    return
        finally:
            self.task.cancel()

    async def _pump(self) -> None:
        try:
            async with aclosing(self._source) as events:
                async for event in events:
                    self._settle(self._waits, True)
                    if isinstance(event, WorkerAlive):
                        continue
                    if isinstance(event, WorkerAdmitted):
                        self._settle(self._admitted, True)
                    self._stream.put(event)
        except PenstockError as error:
            self.error = error
            self._on_lost()
            self._stream.fail(error)
        except Exception as error:  # a fault of ours: whoever reads has it
            self._stream.fail(error)
        finally:
            self._settle(self._waits, False)
            self._settle(self._admitted, False)

    @staticmethod
    def _settle(future: "asyncio.Future[bool]", value: bool) -> None:
        if not future.done():
            future.set_result(value)
