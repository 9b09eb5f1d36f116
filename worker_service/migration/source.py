"""The state machine of a migration source. No I/O.

    OPENING --accepted--> COPYING --little remains--> CLOSING --committed--> HANDED_OVER
       |                    |                           |
       +------ failed, cancelled ------+                +-- failed --> FAILED (the request is resumed)
                                       +--> FAILED

The request keeps decoding until CLOSING, and is resumed unless the target confirms that it runs there. So it is deleted here
only after it runs there. In CLOSING a cancellation waits for the target's response, because it may have committed already.
"""

import enum
from dataclasses import dataclass, replace

from penstock.types.workers import ChunkReceived, NotMoved, TransferAccepted, TransferCommitted, TransferFailed

WINDOW = 2  # chunks in flight: bounds memory on both sides, and keeps the connection busy while one is written
LAST_BLOCKS = 1  # this few full blocks need no further round
MAX_ROUNDS = 8  # a request that decodes faster than its KV is transferred is paused after this many


class SourcePhase(enum.Enum):
    OPENING = "opening"
    COPYING = "copying"
    CLOSING = "closing"
    HANDED_OVER = "handed_over"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SourceState:
    """The state of a source. Block indices count from the start of the sequence. goal: end of the current round."""

    phase: SourcePhase = SourcePhase.OPENING
    round: int = 0
    sent: int = 0
    received: int = 0
    goal: int = 0

    @property
    def over(self) -> bool:
        return self.phase in (SourcePhase.HANDED_OVER, SourcePhase.FAILED)


@dataclass(frozen=True, slots=True)
class Measured:
    """The number of full blocks that the request has now."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The transfer was cancelled."""


SourceEvent = TransferAccepted | Measured | ChunkReceived | TransferCommitted | TransferFailed | Cancelled


@dataclass(frozen=True, slots=True)
class Measure:
    """Get the number of full blocks of the request."""


@dataclass(frozen=True, slots=True)
class SendChunk:
    first: int
    blocks: int


@dataclass(frozen=True, slots=True)
class StopAndSendRest:
    """Pause the request between two steps; send the remaining blocks from `first` on, then the closing."""

    first: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume the request here."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the request, which the target runs: its stream ends with HandedOver, and so does the report to the router."""


@dataclass(frozen=True, slots=True)
class TellRound:
    """Report a finished round to the router; `blocks` in total."""

    round: int
    blocks: int


SourceEffect = Measure | SendChunk | StopAndSendRest | Resume | Delete | TellRound | NotMoved
"""NotMoved is sent to the router."""


def advance(state: SourceState, event: SourceEvent, chunk_blocks: int) -> tuple[SourceState, list[SourceEffect]]:
    """The next state, and the effects in order. chunk_blocks: limit of blocks per chunk. Late events have no effect.

    The stream to the target is closed once the state is over.
    """
    match state.phase, event:
        case SourcePhase.OPENING, TransferAccepted(present=present):
            return replace(state, phase=SourcePhase.COPYING, sent=present, received=present, goal=present), [Measure()]
        case SourcePhase.COPYING, Measured(blocks):
            if blocks - state.sent <= LAST_BLOCKS or state.round >= MAX_ROUNDS:
                return replace(state, phase=SourcePhase.CLOSING), [StopAndSendRest(state.sent)]
            chunks: list[SourceEffect] = []
            sent_blocks = state.sent
            while sent_blocks < blocks and len(chunks) < WINDOW:
                count = min(chunk_blocks, blocks - sent_blocks)
                chunks.append(SendChunk(sent_blocks, count))
                sent_blocks += count
            return replace(state, round=state.round + 1, sent=sent_blocks, goal=blocks), chunks
        case SourcePhase.COPYING, ChunkReceived(blocks):
            now = replace(state, received=state.received + blocks)
            if now.received >= now.goal:
                return now, [TellRound(now.round, now.received), Measure()]
            if now.sent >= now.goal:
                return now, []
            count = min(chunk_blocks, now.goal - now.sent)
            return replace(now, sent=now.sent + count), [SendChunk(now.sent, count)]
        case SourcePhase.CLOSING, TransferCommitted():
            return replace(state, phase=SourcePhase.HANDED_OVER), [Delete()]
        case SourcePhase.CLOSING, TransferFailed(reason):
            return replace(state, phase=SourcePhase.FAILED), [Resume(), NotMoved(reason)]
        case ((SourcePhase.OPENING | SourcePhase.COPYING), TransferFailed(reason)):
            return replace(state, phase=SourcePhase.FAILED), [NotMoved(reason)]
        case ((SourcePhase.OPENING | SourcePhase.COPYING), Cancelled()):
            return replace(state, phase=SourcePhase.FAILED), [NotMoved("cancelled")]
        case _:
            return state, []
