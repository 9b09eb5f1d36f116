"""What source and target say to each other, and what the source tells the router. No I/O.

The target's answers are the events that they are to the source: `source.Accepted`, `Received`, `Committed`, `Failed`.
"""

from dataclasses import dataclass

from worker_service.engine.interface import KvLayout
from worker_service.migration.source import Accepted, Committed, Failed, Received


@dataclass(frozen=True, slots=True)
class Opening:
    """tokens: those whose KV is computed, from position 0 on."""

    transfer_id: str
    layout: KvLayout
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`blocks` consecutive blocks; data: their bytes as KvLayout.blocks_from reads them."""

    first_block: int
    blocks: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Closing:
    """tokens: all of the sequence, prompt included; the last one is without KV. last: the blocks not sent before."""

    tokens: tuple[int, ...]
    last: Chunk | None = None


ToTarget = Opening | Chunk | Closing
ToSource = Accepted | Received | Committed | Failed


@dataclass(frozen=True, slots=True)
class RoundCopied:
    """Totals of what was sent, after round number `round`."""

    round: int
    blocks: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class MovedOut:
    """The request runs at the target from output position `offset` on. stall_s: from the last step here on."""

    offset: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class NotMoved:
    """The request goes on here, unless it has ended. busy: it may be tried again, for another one is being sent."""

    reason: str
    busy: bool = False


Report = RoundCopied | MovedOut | NotMoved
