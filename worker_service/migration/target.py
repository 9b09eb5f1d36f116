"""The state machine of a migration target. No I/O.

    AWAITING --opened--> RECEIVING --closed--> ENTERING --entered--> RUNNING
        |                    |                     |                    |
        +---------+----------+---------+-----------+                    | the router leaves
                                       +--> DROPPED <-------------------+

A transfer exists here only while the stream of the router is open: a request that runs here has a stream that is read, and
ends with it. The loss of the source ends the transfer before its closing has arrived; after that, the request is complete
here, and the router decides which side it reads.
"""

import enum
from dataclasses import dataclass

from penstock.types.workers import KvChunk, ToTarget, TransferClosing, TransferFailed, TransferOpening


class TargetPhase(enum.Enum):
    AWAITING = "awaiting"
    RECEIVING = "receiving"
    ENTERING = "entering"
    RUNNING = "running"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Entered:
    """The engine runs the request."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine refused the request, or a message was invalid."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The source's stream has ended, or was silent for too long."""


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The router's stream has ended."""


TargetEvent = ToTarget | Entered | Refused | SourceLost | RouterLost


@dataclass(frozen=True, slots=True)
class Reserve:
    """Match the prefix, reserve blocks, and tell the source how many are present."""

    opening: TransferOpening


@dataclass(frozen=True, slots=True)
class Write:
    """Write a chunk, and tell the source."""

    chunk: KvChunk


@dataclass(frozen=True, slots=True)
class Enter:
    """Start the request in the engine: the source has paused it and sent everything."""

    closing: TransferClosing


@dataclass(frozen=True, slots=True)
class TellCommitted:
    """Tell the source, and start the stream to the router."""


@dataclass(frozen=True, slots=True)
class Release:
    """Release the reserved blocks."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort the request, whose stream is no longer read."""


@dataclass(frozen=True, slots=True)
class EndReply:
    """End the stream to the router: the request will not arrive."""

    reason: str


TargetEffect = Reserve | Write | Enter | TellCommitted | Release | Abort | TransferFailed | EndReply
"""TransferFailed is sent to the source."""


def advance(phase: TargetPhase, event: TargetEvent) -> tuple[TargetPhase, list[TargetEffect]]:
    """The next phase, and the effects in order. Late or unexpected events have no effect, or are refused."""
    match phase, event:
        case TargetPhase.AWAITING, TransferOpening():
            return TargetPhase.RECEIVING, [Reserve(event)]
        case TargetPhase.RECEIVING, KvChunk():
            return phase, [Write(event)]
        case TargetPhase.RECEIVING, TransferClosing():
            return TargetPhase.ENTERING, [Enter(event)]
        case TargetPhase.RECEIVING, TransferOpening():
            return advance(phase, Refused("opened twice"))
        case TargetPhase.ENTERING, Entered():
            return TargetPhase.RUNNING, [TellCommitted()]
        case ((TargetPhase.RECEIVING | TargetPhase.ENTERING), Refused(reason)):
            return TargetPhase.DROPPED, [Release(), TransferFailed(reason), EndReply(reason)]
        case TargetPhase.RECEIVING, SourceLost():
            return TargetPhase.DROPPED, [Release(), EndReply("the source ended the transfer")]
        case TargetPhase.AWAITING, SourceLost():
            return TargetPhase.DROPPED, [EndReply("no transfer came")]
        case TargetPhase.AWAITING, RouterLost():
            return TargetPhase.DROPPED, []
        case TargetPhase.RECEIVING, RouterLost():
            return TargetPhase.DROPPED, [Release(), TransferFailed("the router no longer expects it")]
        case TargetPhase.ENTERING, RouterLost():
            return TargetPhase.DROPPED, [Abort(), TransferFailed("the router no longer expects it")]
        case TargetPhase.RUNNING, RouterLost():
            return TargetPhase.DROPPED, [Abort()]
        case _:
            return phase, []
