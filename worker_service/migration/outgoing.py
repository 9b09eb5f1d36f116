"""The chunks of one transfer on their way out: through memory shared with the target, or in messages."""

import asyncio
from collections import deque
from contextlib import suppress

import numpy as np

from penstock.types.workers import KvChunk, KvLayout, SharedSegment
from penstock.worker_service.engine.interface import Blocks, blocks_from
from penstock.worker_service.migration.segment import HEADER_BYTES, MAX_SEGMENT_BYTES, NotShared, SourceSegment
from penstock.worker_service.migration.source import WINDOW

CHUNK_BYTES = 1 << 20
"""Of KV in one message; a larger block is a message of its own."""
SHARED_CHUNK_BYTES = 4 << 20
"""Of KV per message where memory is shared: a message takes as long as copying about half a megabyte."""
LEAST_SHARED_BYTES = 256 << 10
"""With less KV to send, one message takes less time than sharing memory."""


class OutgoingChunks:
    """Makes the chunks of one transfer. Use `share` before the opening, and `accepted` with the target's answer to it."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._message_blocks = max(1, CHUNK_BYTES // max(1, layout.block_bytes))  # block_bytes is 0 without layers
        self._segment: SourceSegment | None = None
        self._in_flight: deque[bool] = deque()  # chunks that are not received: whether they are in the segment
        self.blocks = self._message_blocks
        """Limit of blocks per chunk."""

    async def share(self, blocks: int) -> SharedSegment | None:
        """Create memory to share for about this many blocks, if that is worth it; return its address."""
        block_bytes = self._layout.block_bytes
        if blocks * block_bytes < LEAST_SHARED_BYTES:
            return None
        most = (MAX_SEGMENT_BYTES - HEADER_BYTES) // WINDOW // block_bytes
        of_slot = min(max(1, SHARED_CHUNK_BYTES // block_bytes), -(-blocks // WINDOW), most)
        with suppress(NotShared):
            self._segment = await asyncio.to_thread(SourceSegment, of_slot * block_bytes, WINDOW)
            self._shared_blocks = of_slot
            return self._segment.address
        return None

    def accepted(self, shares_segment: bool) -> None:
        """Handle the target's acceptance: whether it reads the shared memory."""
        if self._segment is not None and shares_segment:
            self.blocks = self._shared_blocks
        else:
            self.close()

    def slot(self, blocks: int) -> tuple[int, Blocks] | None:
        """Take shared memory for at most `self.blocks` blocks: its offset, and an array to write into.

        None if the chunk must be sent in a message.
        """
        if self._segment is None or (offset := self._segment.take()) is None:
            return None
        size = blocks * self._layout.block_bytes
        return offset, blocks_from(self._layout, self._segment.memory(offset, size), blocks)

    def chunk(self, first: int, blocks: int, data: Blocks, offset: int | None) -> KvChunk:
        """The chunk of `data`, which is at `offset` of the shared memory, or goes with the message. Counts as sent."""
        self._in_flight.append(offset is not None)
        return KvChunk(first, blocks, data.tobytes() if offset is None else b"", offset)

    def rest(self, first: int, data: Blocks) -> list[KvChunk]:
        """The last blocks as chunks, which are sent without waiting for answers."""
        chunks, at = list[KvChunk](), 0
        while at < len(data):
            part = data[at : at + self.blocks]
            slot = self.slot(len(part))
            if slot is not None:
                np.copyto(slot[1], part)
            else:
                part = part[: self._message_blocks]
            chunks.append(self.chunk(first + at, len(part), part, None if slot is None else slot[0]))
            at += len(part)
        return chunks

    def received(self) -> None:
        """Handle the target's answer to the first chunk that has none."""
        if self._in_flight and self._in_flight.popleft() and self._segment is not None:
            self._segment.give_back()

    def close(self) -> None:
        """Stop sharing. Idempotent."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
