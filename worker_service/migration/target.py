"""The state machine of a migration target. No I/O.

    AWAITING --opened--> RESERVING --reserved--> RECEIVING --closed--> ENTERING --entered--> RUNNING
        |                    |                       |                     |                    |
        +---------+----------+-----------+-----------+---------+-----------+                    | the router leaves
                                         +--> DROPPED <-----------------------------------------+

A transfer exists here only while the stream of the router is open: a request that runs here has a stream that is read, and
ends with it. The loss of the source ends the transfer before its closing has arrived; after that, the request is complete
here, and the router decides which side it reads.
"""

import enum
from dataclasses import dataclass


class TargetPhase(enum.Enum):
    AWAITING = "awaiting"
    RESERVING = "reserving"
    RECEIVING = "receiving"
    ENTERING = "entering"
    RUNNING = "running"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Opened:
    """The source has opened the transfer."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks are reserved; the first `present` contain the prefix of the sequence."""

    present: int


@dataclass(frozen=True, slots=True)
class ChunkCame:
    blocks: int


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk of this many blocks has been written."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The source has paused the request and sent everything."""


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


TargetEvent = Opened | Reserved | ChunkCame | Written | Closed | Entered | Refused | SourceLost | RouterLost


@dataclass(frozen=True, slots=True)
class Reserve:
    """Match the prefix and reserve blocks."""


@dataclass(frozen=True, slots=True)
class TellAccepted:
    present: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write the received chunk."""


@dataclass(frozen=True, slots=True)
class TellReceived:
    blocks: int


@dataclass(frozen=True, slots=True)
class Enter:
    """Start the request in the engine."""


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
class TellRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class EndReply:
    """End the stream to the router: the request will not arrive."""

    reason: str


TargetEffect = (
    Reserve | TellAccepted | Write | TellReceived | Enter | TellCommitted | Release | Abort | TellRefused | EndReply
)


def advance(phase: TargetPhase, event: TargetEvent) -> tuple[TargetPhase, list[TargetEffect]]:
    """The next phase, and the effects in order. Late or unexpected events have no effect, or are refused."""
    match phase, event:
        case TargetPhase.AWAITING, Opened():
            return TargetPhase.RESERVING, [Reserve()]
        case TargetPhase.RESERVING, Reserved(present):
            return TargetPhase.RECEIVING, [TellAccepted(present)]
        case TargetPhase.RECEIVING, ChunkCame():
            return phase, [Write()]
        case TargetPhase.RECEIVING, Written(blocks):
            return phase, [TellReceived(blocks)]
        case TargetPhase.RECEIVING, Closed():
            return TargetPhase.ENTERING, [Enter()]
        case TargetPhase.ENTERING, Entered():
            return TargetPhase.RUNNING, [TellCommitted()]
        case ((TargetPhase.RESERVING | TargetPhase.RECEIVING | TargetPhase.ENTERING), Refused(reason)):
            return TargetPhase.DROPPED, [Release(), TellRefused(reason), EndReply(reason)]
        case ((TargetPhase.RESERVING | TargetPhase.RECEIVING), SourceLost()):
            return TargetPhase.DROPPED, [Release(), EndReply("the source ended the transfer")]
        case TargetPhase.AWAITING, SourceLost():
            return TargetPhase.DROPPED, [EndReply("no transfer came")]
        case TargetPhase.AWAITING, RouterLost():
            return TargetPhase.DROPPED, []
        case ((TargetPhase.RESERVING | TargetPhase.RECEIVING), RouterLost()):
            return TargetPhase.DROPPED, [Release(), TellRefused("the router no longer expects it")]
        case TargetPhase.ENTERING, RouterLost():
            return TargetPhase.DROPPED, [Abort(), TellRefused("the router no longer expects it")]
        case TargetPhase.RUNNING, RouterLost():
            return TargetPhase.DROPPED, [Abort()]
        case _:
            return phase, []
