"""The side that a request comes to: what to do next, given what has happened. No I/O.

    AWAITING --opened--> RESERVING --reserved--> RECEIVING --closed--> ENTERING --entered--> RUNNING
        |                    |                       |                     |                    |
        +---------+----------+-----------+-----------+---------+-----------+                    | the router leaves
                                         +--> DROPPED <-----------------------------------------+

A transfer exists here only as long as the router's stream (the claim) is open: whatever runs here has a stream that somebody
reads, and ends with it. A source that is lost ends the transfer until its closing has come; from then on all is here that the
request needs, and the router decides which side it reads.
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
    """The source has called."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks are set aside; the first `present` hold the sequence's prefix already."""

    present: int


@dataclass(frozen=True, slots=True)
class ChunkCame:
    blocks: int


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk of so many blocks is in its place."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The source has stopped the request and sent everything."""


@dataclass(frozen=True, slots=True)
class Entered:
    """The engine runs it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine cannot take it, or what came makes no sense."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The source's stream has ended, or was silent for too long."""


@dataclass(frozen=True, slots=True)
class ClaimLost:
    """The router's stream has ended."""


TargetEvent = Opened | Reserved | ChunkCame | Written | Closed | Entered | Refused | SourceLost | ClaimLost


@dataclass(frozen=True, slots=True)
class Reserve:
    """Match prefixes and set blocks aside."""


@dataclass(frozen=True, slots=True)
class TellAccepted:
    present: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write the chunk that came."""


@dataclass(frozen=True, slots=True)
class TellReceived:
    blocks: int


@dataclass(frozen=True, slots=True)
class Enter:
    """Hand the request to the engine."""


@dataclass(frozen=True, slots=True)
class TellCommitted:
    """To the source, and the claim's stream begins."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give reserved blocks back."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the request here: nobody reads it."""


@dataclass(frozen=True, slots=True)
class TellRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class EndClaim:
    """The router learns that nothing will come."""

    reason: str


TargetEffect = (
    Reserve | TellAccepted | Write | TellReceived | Enter | TellCommitted | Release | Abort | TellRefused | EndClaim
)


def advance(phase: TargetPhase, event: TargetEvent) -> tuple[TargetPhase, list[TargetEffect]]:
    """The next phase and what to do, in order. What comes late or out of turn changes nothing, or is refused."""
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
            return TargetPhase.DROPPED, [Release(), TellRefused(reason), EndClaim(reason)]
        case ((TargetPhase.RESERVING | TargetPhase.RECEIVING), SourceLost()):
            return TargetPhase.DROPPED, [Release(), EndClaim("the source broke the transfer off")]
        case TargetPhase.AWAITING, SourceLost():
            return TargetPhase.DROPPED, [EndClaim("no transfer came")]
        case TargetPhase.AWAITING, ClaimLost():
            return TargetPhase.DROPPED, []
        case ((TargetPhase.RESERVING | TargetPhase.RECEIVING), ClaimLost()):
            return TargetPhase.DROPPED, [Release(), TellRefused("the router no longer waits for it")]
        case TargetPhase.ENTERING, ClaimLost():
            return TargetPhase.DROPPED, [Abort(), TellRefused("the router no longer waits for it")]
        case TargetPhase.RUNNING, ClaimLost():
            return TargetPhase.DROPPED, [Abort()]
        case _:
            return phase, []
