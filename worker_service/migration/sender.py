"""Sends requests: runs the source's state machine over an engine and a stream to the target."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol, TypeVar

from opentelemetry.metrics import Meter

from penstock.services.background import end
from penstock.services.domain.errors import PenstockError
from penstock.types.workers import (
    ChunkReceived,
    HandedOver,
    MoveReport,
    NotMoved,
    RoundCopied,
    ToSource,
    ToTarget,
    TransferAccepted,
    TransferClosing,
    TransferFailed,
    TransferOpening,
)
from penstock.worker_service.engine.interface import KvTransferring
from penstock.worker_service.migration import source
from penstock.worker_service.migration.bandwidth import BandwidthEstimate
from penstock.worker_service.migration.outgoing import OutgoingChunks

_log = logging.getLogger(__name__)

_Event = TypeVar("_Event")

ANSWER_S = 5.0  # a peer that is silent for this long counts as lost
MAX_TRANSFER_S = 120.0  # limit of a whole move, the wait for the transfer ahead of it at the source included


async def next_event(events: asyncio.Queue[_Event], silent: _Event) -> _Event:
    """The next event; `silent` if there is none in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            return await events.get()
    return silent


class Wire(Protocol):
    """A stream to a target. Its methods raise Unavailable when it is broken."""

    async def send(self, message: ToTarget) -> None: ...

    def answers(self) -> AsyncIterator[ToSource]:
        """The messages of the target, until the stream ends."""
        ...


Dial = Callable[[str], AbstractAsyncContextManager[Wire]]
"""Opens a stream to the target at an address; leaving the context closes it."""


class KvSender:
    """Sends requests with their KV to other workers, at most `max_transfers` at once.

    shares_memory: with workers of the same host, through shared memory. bytes_per_s: at which KV moves; None: as moves show.
    """

    def __init__(
        self,
        engine: KvTransferring,
        dial: Dial,
        meter: Meter,
        max_transfers: int,
        *,
        shares_memory: bool = True,
        bytes_per_s: float | None = None,
    ) -> None:
        self._engine, self._dial, self._max_transfers = engine, dial, max_transfers
        self._shares_memory = shares_memory
        self.bandwidth = BandwidthEstimate(bytes_per_s)
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._moves = meter.create_counter("penstock.worker.moves_out", unit="{move}")
        self._bytes = meter.create_counter("penstock.worker.moved_bytes", unit="By")
        self._stall = meter.create_histogram("penstock.worker.move_stall", unit="s")

    async def move(self, request_id: str, transfer_id: str, address: str) -> AsyncGenerator[MoveReport, None]:
        """Yield rounds, then HandedOver or NotMoved. Leaving the iteration cancels it, if still possible."""
        if request_id in self._under_way:
            yield NotMoved("it is already migrating")
            return
        if len(self._under_way) >= self._max_transfers:
            yield NotMoved(f"{self._max_transfers} transfers are already active here")
            return
        transfer = _Transfer(
            self._engine, self._dial, request_id, transfer_id, address, shares_memory=self._shares_memory
        )
        task = asyncio.create_task(transfer.run(), name=f"move {request_id}")
        self._under_way[request_id] = task
        task.add_done_callback(lambda _: self._under_way.pop(request_id, None))
        try:
            while isinstance(report := await transfer.reports.get(), RoundCopied):
                yield report
            self._count(report, transfer)
            yield report
        finally:
            transfer.events.put_nowait(source.Cancelled())

    async def close(self) -> None:
        await end(*self._under_way.values())

    def _count(self, report: MoveReport, transfer: "_Transfer") -> None:
        self.bandwidth.moved(transfer.copied_bytes, transfer.copied_s)
        self._moves.add(1, {"penstock.outcome": "moved" if isinstance(report, HandedOver) else "failed"})
        self._bytes.add(transfer.sent_bytes)
        if isinstance(report, HandedOver):
            self._stall.record(report.stall_s)


class _Transfer:
    """The transfer of one request."""

    def __init__(
        self,
        engine: KvTransferring,
        dial: Dial,
        request_id: str,
        transfer_id: str,
        address: str,
        *,
        shares_memory: bool,
    ) -> None:
        self._engine, self._dial = engine, dial
        self._request_id, self._transfer_id, self.address = request_id, transfer_id, address
        self._layout, self._shares_memory = engine.kv_layout, shares_memory
        self._chunks = OutgoingChunks(self._layout)
        self._state = source.SourceState()
        self._stopped_at = 0.0
        self.events: asyncio.Queue[source.SourceEvent] = asyncio.Queue()
        self.reports: asyncio.Queue[MoveReport] = asyncio.Queue()
        self.sent_bytes = 0
        self._accepted_at = 0.0
        self.copied_bytes, self.copied_s = 0, 0.0
        """What was sent in whole rounds, and how long that took."""

    async def run(self) -> None:
        try:
            tokens = await self._engine.computed_tokens(self._request_id)
            shared = await self._chunks.share(len(tokens) // self._layout.block_tokens) if self._shares_memory else None
            async with self._dial(self.address) as wire:
                reader = asyncio.create_task(self._read(wire))
                try:
                    await wire.send(TransferOpening(self._transfer_id, self._layout, tokens, shared))
                    await self._drive(wire)
                finally:
                    await end(reader)
        except PenstockError as error:  # before the transfer started
            self.reports.put_nowait(NotMoved(str(error)))
        except Exception as error:
            _log.exception("moving %s failed", self._request_id)
            self.reports.put_nowait(NotMoved(f"internal error: {type(error).__name__}"))
            await self._engine.resume(self._request_id)
        finally:
            self._chunks.close()

    async def _read(self, wire: Wire) -> None:
        try:
            async for answer in wire.answers():
                self.events.put_nowait(answer)
            self.events.put_nowait(TransferFailed("the target ended the stream"))
        except PenstockError as error:
            self.events.put_nowait(TransferFailed(str(error)))

    async def _drive(self, wire: Wire) -> None:
        while not self._state.over:
            event = await next_event(self.events, TransferFailed(f"the target was silent for {ANSWER_S:g} s"))
            match event:
                case TransferAccepted():
                    self._chunks.accepted(event.shares_segment)
                    self._accepted_at = time.monotonic()
                case ChunkReceived():
                    self._chunks.received()
            self._state, effects = source.advance(self._state, event, self._chunks.blocks)
            try:
                for effect in effects:
                    await self._perform(effect, wire)
            except PenstockError as error:
                if self._state.over:  # the request ended before it could be handed over or resumed
                    self.reports.put_nowait(NotMoved(str(error)))
                self.events.put_nowait(TransferFailed(str(error)))

    async def _perform(self, effect: source.SourceEffect, wire: Wire) -> None:
        engine, request_id = self._engine, self._request_id
        match effect:
            case source.Measure():
                computed = len(await engine.computed_tokens(request_id))
                self.events.put_nowait(source.Measured(computed // self._layout.block_tokens))
            case source.SendChunk(first, blocks):
                offset, out = self._chunks.slot(blocks) or (None, None)
                data = await engine.read_kv(request_id, first, blocks, out)
                await wire.send(self._chunks.chunk(first, blocks, data, offset))
                self.sent_bytes += data.nbytes
            case source.StopAndSendRest(first):
                stopped = await engine.pause(request_id, first)
                self._stopped_at = time.monotonic()
                chunks = self._chunks.rest(first, stopped.data)
                for chunk in chunks[:-1]:
                    await wire.send(chunk)
                await wire.send(TransferClosing(stopped.tokens, chunks[-1] if chunks else None))
                self.sent_bytes += stopped.data.nbytes
            case source.Delete():
                left = await engine.leave(request_id)
                self.reports.put_nowait(HandedOver(left.offset, time.monotonic() - self._stopped_at))
            case source.Resume():
                await engine.resume(request_id)
            case source.TellRound(number, blocks):
                self.copied_bytes, self.copied_s = self.sent_bytes, time.monotonic() - self._accepted_at
                self.reports.put_nowait(RoundCopied(number, blocks, self.sent_bytes))
            case NotMoved():
                self.reports.put_nowait(effect)
