"""At which rate KV moves to another worker: measured once without a request, then by the moves themselves."""

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np

from services.domain.errors import Unavailable
from worker_service.engine.interface import KvLayout, KvTransferring
from worker_service.migration import source
from worker_service.migration.incoming import content
from worker_service.migration.messages import Chunk, Opening, ToTarget
from worker_service.migration.outgoing import OutgoingChunks
from worker_service.migration.segment import TargetSegment
from worker_service.migration.wire import Dial

MEASURED_BYTES = 32 << 20
MEASURED_S = 0.3
"""What ends a measurement, whichever is first."""
LEAST_MOVED_BYTES = 4 << 20
"""A move of less KV says more about round trips than about bandwidth."""
SMOOTHING = 0.3
MAX_ABSORBED_BYTES = 4 * MEASURED_BYTES
"""Of one measurement of another worker."""


class BandwidthEstimate:
    """bytes_per_s: 0 while it is unknown. fixed: of the settings; None: as measured."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed is not None
        self.bytes_per_s = fixed or 0.0

    @property
    def known(self) -> bool:
        return self.bytes_per_s > 0

    def measured(self, bytes_per_s: float) -> None:
        if not self._fixed:
            self.bytes_per_s = bytes_per_s

    def moved(self, size_bytes: int, seconds: float) -> None:
        """Handle a transfer."""
        if self._fixed or size_bytes < LEAST_MOVED_BYTES or seconds <= 0:
            return
        rate = size_bytes / seconds
        self.bytes_per_s += (SMOOTHING if self.known else 1.0) * (rate - self.bytes_per_s)


async def measure(engine: KvTransferring, dial: Dial, address: str, *, shares: bool) -> float:
    """Bytes of KV per second to the worker at `address`, with chunks, windows and copies as in a move.

    The engine's KV is copied, for the time that takes, but not sent: what goes out is zeros.

    Raises:
        Unavailable: The worker does not answer, or refuses.
    """
    layout = engine.kv_layout
    if layout.block_bytes == 0:
        raise Unavailable("this engine moves no KV")
    chunks = OutgoingChunks(layout)
    try:
        shared = await chunks.share(MEASURED_BYTES // layout.block_bytes) if shares else None
        async with dial(address) as wire:
            answers = wire.answers()
            await wire.send(Opening("", layout, (), shared, measurement=True))
            answer = await anext(answers, None)
            if not isinstance(answer, source.Accepted):
                raise Unavailable(answer.reason if isinstance(answer, source.Failed) else "it did not answer")
            chunks.accepted(answer.shares_segment)
            blocks, size = chunks.blocks, chunks.blocks * layout.block_bytes
            scratch = layout.blocks_from(memoryview(bytearray(size)), blocks)
            zeros = np.zeros_like(scratch)
            await engine.rehearse_read(scratch)  # touches the memory
            began, sent, received = time.monotonic(), 0, 0
            while received < sent or (sent < MEASURED_BYTES and time.monotonic() - began < MEASURED_S):
                due = sent < MEASURED_BYTES and (sent == 0 or time.monotonic() - began < MEASURED_S)
                if due and sent - received < source.WINDOW * size:
                    slot = chunks.slot(blocks)
                    await engine.rehearse_read(scratch)
                    await wire.send(chunks.chunk(0, blocks, zeros, slot[0] if slot is not None else None))
                    sent += size
                elif isinstance(await anext(answers, None), source.Received):
                    chunks.received()
                    received += size
                else:
                    raise Unavailable("the measurement was ended")
            return received / max(time.monotonic() - began, 1e-9)
    finally:
        chunks.close()


async def absorb(
    layout: KvLayout, segment: TargetSegment | None, messages: AsyncIterator[ToTarget]
) -> AsyncIterator[source.Accepted | source.Received | source.Failed]:
    """The target's side of `measure`: read the chunks as fast as a move's are, and forget them."""
    yield source.Accepted(0, segment is not None)
    scratch = np.empty(0, np.uint8)
    total = 0
    async for message in messages:
        if not isinstance(message, Chunk):
            yield source.Failed("a measurement has only chunks")
            return
        size = message.blocks * layout.block_bytes
        total += size
        if total > MAX_ABSORBED_BYTES:
            yield source.Failed(f"a measurement has at most {MAX_ABSORBED_BYTES} bytes")
            return
        try:
            data = layout.blocks_from(content(message, layout, segment), message.blocks)
        except ValueError as error:
            yield source.Failed(str(error))
            return
        if scratch.size < size:
            scratch = np.empty(size, np.uint8)
        await asyncio.to_thread(np.copyto, scratch[:size], np.frombuffer(data.data, np.uint8))
        yield source.Received(message.blocks)
