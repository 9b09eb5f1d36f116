"""The content of chunks that arrive: in shared memory, or in the messages."""

from worker_service.engine.interface import KvLayout
from worker_service.migration.messages import Chunk, SegmentAddress
from worker_service.migration.segment import NotShared, TargetSegment


def opened(address: SegmentAddress | None) -> TargetSegment | None:
    """The segment that a source offers; None if this worker is not on its host, or has no part in it otherwise."""
    if address is None:
        return None
    try:
        return TargetSegment(address)
    except NotShared:
        return None


def content(chunk: Chunk, layout: KvLayout, segment: TargetSegment | None) -> bytes | memoryview:
    """The bytes of a chunk.

    Raises:
        ValueError: They are not within the shared memory, or there is none.
    """
    if chunk.shared_offset is None:
        return chunk.data
    if segment is None:
        raise ValueError("shared_offset: no memory is shared")
    return segment.memory(chunk.shared_offset, chunk.blocks * layout.block_bytes)
