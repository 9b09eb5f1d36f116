"""Sends requests: runs the source's state machine over an engine and a stream to the target."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

from opentelemetry.metrics import Meter

from services.background import end
from services.domain.errors import PenstockError
from worker_service.engine.interface import KvTransferring
from worker_service.migration import source
from worker_service.migration.messages import (
    Chunk,
    Closing,
    MovedOut,
    NotMoved,
    Opening,
    Report,
    RoundCopied,
    ToSource,
    ToTarget,
)

_log = logging.getLogger(__name__)

ANSWER_S = 5.0  # a peer that is silent for this long counts as lost
MAX_TRANSFER_S = 120.0  # limit of a whole move, the wait for the transfer ahead of it at the source included
CHUNK_BYTES = 1 << 20  # of KV in one message; a larger block is a message of its own


class Wire(Protocol):
    """A stream to a target. Its methods raise Unavailable when it is broken."""

    async def send(self, message: ToTarget) -> None: ...

    def answers(self) -> AsyncIterator[ToSource]:
        """The messages of the target, until the stream ends."""
        ...


Dial = Callable[[str], AbstractAsyncContextManager[Wire]]
"""Opens a stream to the target at an address; leaving the context closes it."""


class KvSender:
    """Sends requests with their KV to other workers, at most `max_transfers` at once."""

    def __init__(self, engine: KvTransferring, dial: Dial, meter: Meter, max_transfers: int) -> None:
        self._engine, self._dial, self._max_transfers = engine, dial, max_transfers
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._moves = meter.create_counter("penstock.worker.moves_out", unit="{move}")
        self._bytes = meter.create_counter("penstock.worker.moved_bytes", unit="By")
        self._stall = meter.create_histogram("penstock.worker.move_stall", unit="s")

    async def move(self, request_id: str, transfer_id: str, address: str) -> AsyncGenerator[Report, None]:
        """Yield rounds, then MovedOut or NotMoved. Leaving the iteration cancels the transfer, if that is still possible."""
        if request_id in self._under_way:
            yield NotMoved("it is already migrating")
            return
        if len(self._under_way) >= self._max_transfers:
            yield NotMoved(f"{self._max_transfers} transfers are already active here")
            return
        transfer = _Transfer(self._engine, self._dial, request_id, transfer_id, address)
        task = asyncio.create_task(transfer.run(), name=f"move {request_id}")
        self._under_way[request_id] = task
        task.add_done_callback(lambda _: self._under_way.pop(request_id, None))
        try:
            while True:
                report = await transfer.reports.get()
                if not isinstance(report, RoundCopied):
                    self._count(report, transfer.sent_bytes)
                    yield report
                    return
                yield report
        finally:
            transfer.events.put_nowait(source.Cancelled())

    async def close(self) -> None:
        await end(*self._under_way.values())

    def _count(self, report: Report, sent_bytes: int) -> None:
        self._moves.add(1, {"penstock.outcome": "moved" if isinstance(report, MovedOut) else "failed"})
        self._bytes.add(sent_bytes)
        if isinstance(report, MovedOut):
            self._stall.record(report.stall_s)


class _Transfer:
    """The transfer of one request."""

    def __init__(self, engine: KvTransferring, dial: Dial, request_id: str, transfer_id: str, address: str) -> None:
        self._engine, self._dial = engine, dial
        self._request_id, self._transfer_id, self._address = request_id, transfer_id, address
        self._layout = engine.kv_layout
        self._chunk_blocks = max(1, CHUNK_BYTES // max(1, self._layout.block_bytes))  # block_bytes is 0 without layers
        self._state = source.SourceState()
        self._stopped_at = 0.0
        self._offset = 0
        self.events: asyncio.Queue[source.SourceEvent] = asyncio.Queue()
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.sent_bytes = 0

    async def run(self) -> None:
        try:
            tokens = await self._engine.computed_tokens(self._request_id)
            async with self._dial(self._address) as wire:
                reader = asyncio.create_task(self._read(wire))
                try:
                    await wire.send(Opening(self._transfer_id, self._layout, tokens))
                    await self._drive(wire)
                finally:
                    await end(reader)
        except PenstockError as error:  # before the transfer started
            self.reports.put_nowait(NotMoved(str(error)))
        except Exception as error:
            _log.exception("moving %s failed", self._request_id)
            self.reports.put_nowait(NotMoved(f"internal error: {type(error).__name__}"))
            await self._engine.resume(self._request_id)

    async def _read(self, wire: Wire) -> None:
        try:
            async for answer in wire.answers():
                self.events.put_nowait(answer)
            self.events.put_nowait(source.Failed("the target ended the stream"))
        except PenstockError as error:
            self.events.put_nowait(source.Failed(str(error)))

    async def _drive(self, wire: Wire) -> None:
        while not self._state.over:
            event: source.SourceEvent = source.Failed(f"the target was silent for {ANSWER_S:g} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    event = await self.events.get()
            self._state, effects = source.advance(self._state, event, self._chunk_blocks)
            try:
                for effect in effects:
                    await self._perform(effect, wire)
            except PenstockError as error:
                if self._state.over:  # the request ended before it could be handed over or resumed
                    self.reports.put_nowait(NotMoved(str(error)))
                self.events.put_nowait(source.Failed(str(error)))

    async def _perform(self, effect: source.SourceEffect, wire: Wire) -> None:
        engine, request_id = self._engine, self._request_id
        match effect:
            case source.Measure():
                computed = len(await engine.computed_tokens(request_id))
                self.events.put_nowait(source.Measured(computed // self._layout.block_tokens))
            case source.SendChunk(first, blocks):
                data = await engine.read_kv(request_id, first, blocks)
                await self._send(wire, Chunk(first, blocks, data.tobytes()))
            case source.StopAndSendRest(first):
                stopped = await engine.pause(request_id, first)
                self._stopped_at = time.monotonic()
                last: Chunk | None = None
                for at in range(0, len(stopped.data), self._chunk_blocks):
                    if last is not None:
                        await self._send(wire, last)
                    part = stopped.data[at : at + self._chunk_blocks]
                    last = Chunk(first + at, len(part), part.tobytes())
                await wire.send(Closing(stopped.tokens, last))
                self.sent_bytes += len(last.data) if last is not None else 0
            case source.Delete():
                self._offset = (await engine.leave(request_id)).offset
            case source.Resume():
                await engine.resume(request_id)
            case source.TellRound(number, blocks):
                self.reports.put_nowait(RoundCopied(number, blocks, self.sent_bytes))
            case source.TellHandedOver():
                self.reports.put_nowait(MovedOut(self._offset, time.monotonic() - self._stopped_at))
            case source.TellFailed(reason):
                self.reports.put_nowait(NotMoved(reason))
            case source.HangUp():
                pass  # the stream is closed when the state machine has ended

    async def _send(self, wire: Wire, chunk: Chunk) -> None:
        await wire.send(chunk)
        self.sent_bytes += len(chunk.data)
