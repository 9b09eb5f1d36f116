"""The messages between migration source and target, and from the source to the router. No I/O.

The target's messages are events of the source's state machine: `source.Accepted`, `Received`, `Committed`, `Failed`.
"""

from dataclasses import dataclass

from worker_service.engine.interface import KvLayout
from worker_service.migration.source import Accepted, Committed, Failed, Received


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """Where a shared segment is found on its host (`segment`). size_bytes: of the whole file. secret: its first bytes."""

    process_id: int
    descriptor: int
    size_bytes: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class Opening:
    """The first message of a transfer. tokens: the tokens with KV, from position 0 on.

    shared: memory through which chunks may come. measurement: no request moves, the chunks are read and forgotten.
    """

    transfer_id: str
    layout: KvLayout
    tokens: tuple[int, ...]
    shared: SegmentAddress | None = None
    measurement: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """`blocks` consecutive blocks; data: their bytes, for KvLayout.blocks_from.

    shared_offset: where they begin in the shared segment instead, where they stay until the chunk is received.
    """

    first_block: int
    blocks: int
    data: bytes = b""
    shared_offset: int | None = None


@dataclass(frozen=True, slots=True)
class Closing:
    """The last message of a transfer. tokens: all of the sequence; the last one has no KV. last: the remaining blocks."""

    tokens: tuple[int, ...]
    last: Chunk | None = None


ToTarget = Opening | Chunk | Closing
ToSource = Accepted | Received | Committed | Failed


@dataclass(frozen=True, slots=True)
class RoundCopied:
    """Totals of the data sent, after round number `round`."""

    round: int
    blocks: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class MovedOut:
    """The request runs on the target from output position `offset` on. stall_s: time since the last step here."""

    offset: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class NotMoved:
    """The request continues here, unless it has ended. busy: another one is being sent; try again."""

    reason: str
    busy: bool = False


Report = RoundCopied | MovedOut | NotMoved
