"""One reply of workers that hand it over to each other while it runs."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from penstock.router_service.clients.worker_client import Metadata, WorkerClient
from penstock.router_service.domain.failures import Failure, InstanceFailed
from penstock.router_service.migration import moves
from penstock.router_service.migration.moves import MoveEvent, Reading
from penstock.services.background import end
from penstock.services.domain.errors import AlreadyRunning, NotFound, Overloaded, PenstockError, Unavailable
from penstock.services.domain.instances import InstanceRecord
from penstock.services.event_streams import OnTokens
from penstock.types.mesh_status import ReplyMoved
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.workers import Admitted, Alive, EngineFinished, NotMoved, RoundCopied, WorkerEnd, WorkerEvent

_log = logging.getLogger(__name__)

MAX_MOVE_S = 120.0
ORPHANED_S = 5.0
"""How long a reply whose source is lost waits for its target to run it: a target that has all of it needs a step or two, and
one that a source never called would wait as long as a move may take."""


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """All further events are from another instance. why: the reason of the move."""

    record: InstanceRecord
    why: str


OnReplyEvent = Callable[[WorkerEvent | WorkerChanged], None]


class MovableReply:
    """One reply, at one worker after another. `run` reads it; `move` may be called meanwhile."""

    def __init__(
        self,
        workers: WorkerClient,
        record: InstanceRecord,
        request: GenerationRequest,
        deadline_s: float,
        metadata: Metadata,
        *,
        on_event: OnReplyEvent,
        on_tokens: OnTokens,
        on_failure: Callable[[InstanceRecord, PenstockError], None] = lambda _record, _error: None,
        may_move: Callable[[], bool] = lambda: True,
        at_target: Callable[[GenerationRequest], GenerationRequest] = lambda request: request,
    ) -> None:
        """deadline_s: on the event loop's clock.

        on_event, on_tokens: called, in order, with what the worker sends that is read; with WorkerChanged after each move.
        on_failure: called for an instance that fails while the reply continues on another: the source or target of a move.
        may_move: whether a move may begin. at_target: the request as the target of a move gets it.
        """
        self._workers, self._request, self._metadata = workers, request, metadata
        self._deadline_s, self._loop = deadline_s, asyncio.get_running_loop()
        self._on_event, self._on_tokens = on_event, on_tokens
        self._on_failure, self._may_move, self._at_target = on_failure, may_move, at_target
        self.record = record
        self._reading = Reading.AT_SOURCE
        self._target: _TargetReply | None = None
        self._target_tasks: set[asyncio.Task[None]] = set()
        self._why = ""

    async def run(self) -> EngineFinished:
        """Read the reply to its end, wherever it moves. Cancelling cancels it at the workers.

        Raises:
            PenstockError: The error of the worker that is read, or of a callback; Unavailable if the worker's connection
                breaks, it goes silent, or it aborts the reply.
        """
        reading: Awaitable[WorkerEnd] = self._generate(self.record.address, self._on_event, self._pass_tokens)
        try:
            while True:
                try:
                    last = await reading
                    if isinstance(last, EngineFinished):
                        if last.reason in (FinishReason.STOP, FinishReason.LENGTH) or self._was_declined(last):
                            return last
                        raise InstanceFailed(Failure.ABORTED, f"the worker ended the reply: {last.reason.value}")
                    self._advance(MoveEvent.SOURCE_HANDED_OVER)
                except (Unavailable, NotFound, AlreadyRunning, Overloaded) as error:
                    self._advance(MoveEvent.SOURCE_LOST)
                    if self._reading is Reading.ORPHANED and self._target is not None:
                        admitted = await self._target.admitted(ORPHANED_S)
                        self._advance(MoveEvent.TARGET_ADMITTED if admitted else MoveEvent.TARGET_LOST)
                    if self._reading is not Reading.AT_TARGET:
                        raise
                    self._on_failure(self.record, error)
                target, self._target = self._target, None
                if self._reading is not Reading.AT_TARGET or target is None:
                    raise InstanceFailed(Failure.ABORTED, "the worker handed the reply over, but the target is gone")
                self.record, self._reading = target.record, Reading.AT_SOURCE
                self._on_event(WorkerChanged(self.record, self._why))
                reading = target.read(self._on_event, self._pass_tokens)
        finally:
            self._reading = Reading.LOST  # no move begins after this
            await end(*self._target_tasks)

    async def move(
        self,
        target: InstanceRecord,
        why: str,
        *,
        starving: bool = False,
        on_started: Callable[[], Awaitable[None]] | None = None,
    ) -> ReplyMoved | NotMoved:
        """Have the reply continue on `target`; return when it does, or will not.

        starving: the source sends it next, after the request that it is sending. on_started: called when it is being sent.
        """
        if self._reading is not Reading.AT_SOURCE or self._target is not None:
            return NotMoved("it has ended or is moving already")
        if target.instance_id == self.record.instance_id:
            return NotMoved("it is there already")
        if not self._may_move():
            return NotMoved("instances died while they worked on it, or its SLO leaves no time for a move")
        transfer_id, source, sent_bytes = secrets.token_hex(8), self.record, 0
        self._why = why
        at_target = self._target = _TargetReply(
            target,
            lambda reply: self._generate(target.address, reply.event, reply.tokens, transfer_id),
            self._target_lost,
        )
        self._target_tasks.add(at_target.task)
        at_target.task.add_done_callback(self._target_tasks.discard)
        self._advance(MoveEvent.BEGUN)
        reported = False
        try:
            if not await at_target.waits():
                return NotMoved(f"the target does not wait for it: {at_target.error or 'the reply has ended'}")
            reports = self._workers.migrate_out(
                source.address,
                self._request.request_id,
                transfer_id,
                target.instance_id,
                starving=starving,
                timeout_s=min(MAX_MOVE_S, self._left_s()),
                metadata=self._metadata,
            )
            async with aclosing(reports):
                async for report in reports:
                    if on_started is not None and not (isinstance(report, NotMoved) and report.busy):
                        await on_started()
                        on_started = None
                    match report:
                        case RoundCopied():
                            sent_bytes = report.sent_bytes
                        case NotMoved():
                            reported = True
                            self._advance(MoveEvent.MOVE_FAILED, at_target)
                            return NotMoved(report.reason, report.busy)
                        case _:
                            reported = True
                            return ReplyMoved(report.offset, report.stall_s, sent_bytes)
            return NotMoved("the source did not report how it ended")
        except PenstockError as error:
            return NotMoved(str(error))
        finally:
            if not reported:
                self._advance(MoveEvent.REPORT_LOST, at_target)

    def _was_declined(self, last: EngineFinished) -> bool:
        return last.reason is FinishReason.DECLINED and self._request.decline_unkept_slo

    def _target_lost(self, target: "_TargetReply") -> None:
        if target is self._target and target.error is not None:  # it is not read yet, so `run` does not see the error
            self._on_failure(target.record, target.error)
        self._advance(MoveEvent.TARGET_LOST, target)

    def _advance(self, event: MoveEvent, target: "_TargetReply | None" = None) -> None:
        """target: of the move that the event belongs to; an event of an earlier move is ignored."""
        if target is not None and target is not self._target:
            return
        self._reading = moves.advance(self._reading, event)
        if self._reading in (Reading.AT_SOURCE, Reading.LOST) and self._target is not None:
            self._target.task.cancel()
            self._target = None

    def _pass_tokens(self, frame: TokenFrame) -> None:
        """Take a frame of the worker that is read."""
        if self._reading is not Reading.AT_SOURCE:
            self._advance(MoveEvent.SOURCE_CONTINUED)
        self._on_tokens(frame)

    def _generate(
        self, address: str, on_event: Callable[[WorkerEvent], None], on_tokens: OnTokens, transfer_id: str = ""
    ) -> Awaitable[WorkerEnd]:
        return self._workers.generate(
            address,
            self._at_target(self._request) if transfer_id else self._request,
            timeout_s=self._left_s(),
            metadata=self._metadata,
            transfer_id=transfer_id,
            on_event=on_event,
            on_tokens=on_tokens,
        )

    def _left_s(self) -> float:
        return max(0.001, self._deadline_s - self._loop.time())


class _TargetReply:
    """The reply at the target of a move, from before the transfer; its events are queued until it is read."""

    def __init__(
        self,
        record: InstanceRecord,
        generate: Callable[["_TargetReply"], Awaitable[WorkerEnd]],
        on_lost: Callable[["_TargetReply"], None],
    ) -> None:
        """generate: begins the reply and passes its events to `event` and `tokens`."""
        self.record = record
        self.error: PenstockError | None = None
        self._on_lost = on_lost
        self._queue: list[WorkerEvent | WorkerChanged | TokenFrame] = []
        self._on_event: OnReplyEvent = self._queue.append
        self._on_tokens: OnTokens = self._queue.append
        loop = asyncio.get_running_loop()
        self._end: WorkerEnd | Exception | None = None
        self._waits: asyncio.Future[bool] = loop.create_future()
        self._admitted: asyncio.Future[bool] = loop.create_future()
        self.task = asyncio.create_task(self._run(generate), name=f"move to {record.instance_id}")

    async def waits(self) -> bool:
        """Return when the target waits for the transfer; False if it does not."""
        return await asyncio.shield(self._waits)

    async def admitted(self, within_s: float) -> bool:
        """Return when the target runs the request; False if it will not, or not within `within_s`."""
        await asyncio.wait({self._admitted}, timeout=within_s)
        return self._admitted.done() and self._admitted.result()

    def event(self, event: WorkerEvent) -> None:
        self._settle(self._waits, True)
        if isinstance(event, Alive):
            return
        if isinstance(event, Admitted):
            self._settle(self._admitted, True)
        self._on_event(event)

    def tokens(self, frame: TokenFrame) -> None:
        self._on_tokens(frame)

    async def read(self, on_event: OnReplyEvent, on_tokens: OnTokens) -> WorkerEnd:
        """Pass on the queued events, then the others as they come; return the last. Cancelling cancels the reply.

        Raises:
            PenstockError: The worker's error, or that of a callback.
        """
        try:
            for event in self._queue:
                if isinstance(event, TokenFrame):
                    on_tokens(event)
                else:
                    on_event(event)
            self._on_event, self._on_tokens = on_event, on_tokens
            await self.task
        finally:
            self.task.cancel()
        if isinstance(self._end, Exception):
            raise self._end
        assert self._end is not None
        return self._end

    async def _run(self, generate: Callable[["_TargetReply"], Awaitable[WorkerEnd]]) -> None:
        try:
            self._end = await generate(self)
        except PenstockError as error:
            self.error = self._end = error
            self._on_lost(self)
        except Exception as error:  # of a callback; raised to the reader
            self._end = error
        finally:
            self._settle(self._waits, False)
            self._settle(self._admitted, False)

    @staticmethod
    def _settle(future: "asyncio.Future[bool]", value: bool) -> None:
        if not future.done():
            future.set_result(value)
