"""The side that a request leaves: what to do next, given what has happened. No I/O.

    OPENING --accepted--> COPYING --little is left--> CLOSING --committed--> HANDED_OVER
       |                    |                           |
       +------ failed, cancelled ------+                +-- failed --> FAILED (the request is resumed)
                                       +--> FAILED

The request decodes on until CLOSING, and is resumed where the target did not say that it runs it. So it is deleted here only
after it runs there. In CLOSING a cancellation waits for the verdict: the target may have committed already.
"""

import enum
from dataclasses import dataclass, replace

WINDOW = 2  # chunks under way: bounds the memory on both sides, and keeps the wire busy while one is written
LAST_BLOCKS = 1  # so few whole blocks need no round of their own
MAX_ROUNDS = 8  # a request that decodes faster than its KV travels is stopped after so many


class SourcePhase(enum.Enum):
    OPENING = "opening"
    COPYING = "copying"
    CLOSING = "closing"
    HANDED_OVER = "handed_over"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SourceState:
    """Blocks are counted from the sequence's first. goal: where the current round ends."""

    phase: SourcePhase = SourcePhase.OPENING
    round: int = 0
    sent: int = 0
    received: int = 0
    goal: int = 0

    @property
    def over(self) -> bool:
        return self.phase in (SourcePhase.HANDED_OVER, SourcePhase.FAILED)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The target has room; it holds the first `present` blocks already."""

    present: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The request has so many whole blocks now."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Received:
    """The target has written a chunk of so many blocks."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The target runs the request."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A refusal, a broken stream, silence, or the request has ended or lost its KV here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody wants the transfer any more."""


SourceEvent = Accepted | Measured | Received | Committed | Failed | Cancelled


@dataclass(frozen=True, slots=True)
class Measure:
    """Find out how many whole blocks the request has."""


@dataclass(frozen=True, slots=True)
class SendChunk:
    first: int
    blocks: int


@dataclass(frozen=True, slots=True)
class StopAndSendRest:
    """Stop the request between two steps; send what is left from block `first` on, then the closing."""

    first: int


@dataclass(frozen=True, slots=True)
class Resume:
    """The request goes on here."""


@dataclass(frozen=True, slots=True)
class Delete:
    """The request has left; its stream ends with the hand-over."""


@dataclass(frozen=True, slots=True)
class HangUp:
    """Break the stream to the target off."""


@dataclass(frozen=True, slots=True)
class TellRound:
    """A round has arrived; `blocks` so far."""

    round: int
    blocks: int


@dataclass(frozen=True, slots=True)
class TellHandedOver:
    """The router may follow."""


@dataclass(frozen=True, slots=True)
class TellFailed:
    reason: str


SourceEffect = (
    Measure | SendChunk | StopAndSendRest | Resume | Delete | HangUp | TellRound | TellHandedOver | TellFailed
)


def advance(state: SourceState, event: SourceEvent, chunk_blocks: int) -> tuple[SourceState, list[SourceEffect]]:
    """The next state and what to do, in order. chunk_blocks: most blocks of one chunk. What comes late changes nothing."""
    match state.phase, event:
        case SourcePhase.OPENING, Accepted(present):
            return replace(state, phase=SourcePhase.COPYING, sent=present, received=present, goal=present), [Measure()]
        case SourcePhase.COPYING, Measured(blocks):
            if blocks - state.sent <= LAST_BLOCKS or state.round >= MAX_ROUNDS:
                return replace(state, phase=SourcePhase.CLOSING), [StopAndSendRest(state.sent)]
            chunks: list[SourceEffect] = []
            sent = state.sent
            while sent < blocks and len(chunks) < WINDOW:
                count = min(chunk_blocks, blocks - sent)
                chunks.append(SendChunk(sent, count))
                sent += count
            return replace(state, round=state.round + 1, sent=sent, goal=blocks), chunks
        case SourcePhase.COPYING, Received(blocks):
            now = replace(state, received=state.received + blocks)
            if now.received >= now.goal:
                return now, [TellRound(now.round, now.received), Measure()]
            if now.sent >= now.goal:
                return now, []
            count = min(chunk_blocks, now.goal - now.sent)
            return replace(now, sent=now.sent + count), [SendChunk(now.sent, count)]
        case SourcePhase.CLOSING, Committed():
            return replace(state, phase=SourcePhase.HANDED_OVER), [Delete(), TellHandedOver()]
        case SourcePhase.CLOSING, Failed(reason):
            return replace(state, phase=SourcePhase.FAILED), [HangUp(), Resume(), TellFailed(reason)]
        case ((SourcePhase.OPENING | SourcePhase.COPYING), Failed(reason)):
            return replace(state, phase=SourcePhase.FAILED), [HangUp(), TellFailed(reason)]
        case ((SourcePhase.OPENING | SourcePhase.COPYING), Cancelled()):
            return replace(state, phase=SourcePhase.FAILED), [HangUp(), TellFailed("cancelled")]
        case _:
            return state, []
