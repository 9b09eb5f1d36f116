"""What workers send of a reply, in addition to its tokens."""

import enum
from dataclasses import dataclass

from penstock.types.replies import FinishReason, Usage
from penstock.types.values import value_type


@value_type(frozen=True, slots=True)
class Admitted:
    """First event of a request: it will be served. slo_kept: its SLO will be met; otherwise it is served as best effort."""

    prompt_tokens: int
    max_output_tokens: int
    slo_kept: bool = False


@dataclass(frozen=True, slots=True)
class Declined:
    """First event of a request whose SLO cannot be kept and that is not served as best effort; EngineFinished follows."""

    reason: str


@value_type(frozen=True, slots=True)
class Alive:
    """The request waits, or computes without output."""


class MoveReason(enum.StrEnum):
    """Why a request should move."""

    RANGE_CROSSED = "range_crossed"
    OVERLOADED = "overloaded"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class MoveAdvice:
    """One request should move.

    tokens: its length, prompt and output so far. sender_tokens: total length of the requests that should leave the instance.
    """

    reason: MoveReason
    tokens: int
    sender_tokens: int


@value_type(frozen=True, slots=True)
class EngineFinished:
    """Last event of a request. stop: the stop string that ended the reply, if one did. preemptions: times it was recomputed.

    drafted_tokens, accepted_drafted_tokens: of drafting models, verified and accepted; drafts that came with the request are
    in its usage.
    """

    reason: FinishReason
    usage: Usage
    stop: str | None = None
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_drafted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Last event of a request that continues in another engine, from output position `offset` on.

    stall_s: from the last step of the source to the target's confirmation; only in the report of a move.
    """

    offset: int
    stall_s: float = 0.0


WorkerEvent = Admitted | Declined | MoveAdvice | Alive
"""What a worker sends before the end of a reply, except frames of tokens."""
WorkerEnd = EngineFinished | HandedOver
"""The last event of a reply at one worker."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV layout, which two engines must share to exchange blocks: (layers, 2, elements).

    A block's keys and values of a layer have block_tokens * kv_heads * head_dim elements, in the order of the engine's pool.
    dtype uint8: bytes that only the engine can read, as of one layer.
    dtype: its name in numpy: float32, float16, bfloat16.
    """

    model_digest: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        size = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}[self.dtype]
        return self.layers * 2 * self.block_tokens * self.kv_heads * self.head_dim * size

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / self.block_tokens


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """Where a shared segment is found on its host: /proc/<process_id>/fd/<descriptor>. size_bytes: of the whole file. secret:
    its first bytes."""

    process_id: int
    descriptor: int
    size_bytes: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class TransferOpening:
    """The first message of a transfer. tokens: the tokens with KV, from position 0 on.

    shared: memory through which chunks may come.
    """

    transfer_id: str
    layout: KvLayout
    tokens: tuple[int, ...]
    shared: SharedSegment | None = None


@dataclass(frozen=True, slots=True)
class KvChunk:
    """`blocks` consecutive blocks; data: their bytes, in the KvLayout.

    shared_offset: where they begin in the shared segment instead, where they stay until the chunk is received.
    """

    first_block: int
    blocks: int
    data: bytes = b""
    shared_offset: int | None = None


@dataclass(frozen=True, slots=True)
class TransferClosing:
    """The last message of a transfer. tokens: all of the sequence; the last one has no KV. last: the remaining blocks."""

    tokens: tuple[int, ...]
    last: KvChunk | None = None


@dataclass(frozen=True, slots=True)
class TransferAccepted:
    """The target has room; the first `present` blocks are present there. shares_segment: it reads the shared memory."""

    present: int
    shares_segment: bool = False


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """The target has written a chunk of this many blocks."""

    blocks: int


@dataclass(frozen=True, slots=True)
class TransferCommitted:
    """The target runs the request."""


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """A refusal, a broken or silent stream, or the request has ended or lost its KV at its source."""

    reason: str


@dataclass(frozen=True, slots=True)
class RoundCopied:
    """Totals of the data sent, after round number `round`."""

    round: int
    blocks: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class NotMoved:
    """The request continues where it is, unless it has ended. busy: another one is being sent; try again."""

    reason: str
    busy: bool = False


ToTarget = TransferOpening | KvChunk | TransferClosing
"""Messages of a migration source to its target."""
ToSource = TransferAccepted | ChunkReceived | TransferCommitted | TransferFailed
MoveReport = RoundCopied | HandedOver | NotMoved
"""What a source reports to the router."""


@dataclass(frozen=True, slots=True)
class SenderBusy:
    """The sender is transmitting another request: this one waits for its next turn."""


@dataclass(frozen=True, slots=True)
class TransferStarted:
    """The transfer has started."""


@dataclass(frozen=True, slots=True)
class TransferTurn:
    """The transfer should start now. starving: it was skipped too often, and the sender should send it next."""

    starving: bool
