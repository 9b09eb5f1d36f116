"""Which of two instances a reply is read from while it moves. No I/O.

    AT_SOURCE --begun--> MOVING --source handed over--> AT_TARGET
        ^                  |  |
        +-- move failed ---+  +-- source lost --> ORPHANED --target admitted--> AT_TARGET
        |                  |                         |
        |            word broken off                 +-- target lost --> LOST
        |                  v
        +-- source speaks, UNCERTAIN (else as MOVING)
            target lost

Exactly one instance is read in every state; in LOST none, and the reply is computed anew elsewhere. The source is read until
it says that it has handed over, however far the target is: what the target computes meanwhile waits in its stream.
"""

import enum


class Reading(enum.Enum):
    AT_SOURCE = "at_source"
    MOVING = "moving"
    UNCERTAIN = "uncertain"
    """The source's word on the move broke off: it is dead, or only that stream is."""
    ORPHANED = "orphaned"
    AT_TARGET = "at_target"
    LOST = "lost"


class MoveEvent(enum.Enum):
    BEGUN = "begun"
    MOVE_FAILED = "move_failed"
    WORD_BROKEN = "word_broken"
    SOURCE_SPOKE = "source_spoke"
    SOURCE_HANDED_OVER = "source_handed_over"
    SOURCE_LOST = "source_lost"
    TARGET_ADMITTED = "target_admitted"
    TARGET_LOST = "target_lost"


class MoveEffect(enum.Enum):
    READ_TARGET = "read_target"
    DROP_CLAIM = "drop_claim"
    """End the stream at the target: what runs there, or waits, ends with it."""
    COMPUTE_ANEW = "compute_anew"


_NEXT: dict[tuple[Reading, MoveEvent], tuple[Reading, tuple[MoveEffect, ...]]] = {
    (Reading.AT_SOURCE, MoveEvent.BEGUN): (Reading.MOVING, ()),
    (Reading.AT_SOURCE, MoveEvent.SOURCE_LOST): (Reading.LOST, (MoveEffect.COMPUTE_ANEW,)),
    # the claim is gone: the source handed over, but not to anybody who would still be read
    (Reading.AT_SOURCE, MoveEvent.SOURCE_HANDED_OVER): (Reading.LOST, (MoveEffect.COMPUTE_ANEW,)),
    (Reading.MOVING, MoveEvent.MOVE_FAILED): (Reading.AT_SOURCE, (MoveEffect.DROP_CLAIM,)),
    (Reading.MOVING, MoveEvent.TARGET_LOST): (Reading.AT_SOURCE, (MoveEffect.DROP_CLAIM,)),
    (Reading.MOVING, MoveEvent.SOURCE_HANDED_OVER): (Reading.AT_TARGET, (MoveEffect.READ_TARGET,)),
    (Reading.MOVING, MoveEvent.SOURCE_LOST): (Reading.ORPHANED, ()),
    (Reading.MOVING, MoveEvent.WORD_BROKEN): (Reading.UNCERTAIN, ()),
    (Reading.UNCERTAIN, MoveEvent.SOURCE_SPOKE): (Reading.AT_SOURCE, (MoveEffect.DROP_CLAIM,)),
    (Reading.UNCERTAIN, MoveEvent.TARGET_LOST): (Reading.AT_SOURCE, (MoveEffect.DROP_CLAIM,)),
    (Reading.UNCERTAIN, MoveEvent.SOURCE_HANDED_OVER): (Reading.AT_TARGET, (MoveEffect.READ_TARGET,)),
    (Reading.UNCERTAIN, MoveEvent.SOURCE_LOST): (Reading.ORPHANED, ()),
    (Reading.ORPHANED, MoveEvent.TARGET_ADMITTED): (Reading.AT_TARGET, (MoveEffect.READ_TARGET,)),
    (Reading.ORPHANED, MoveEvent.TARGET_LOST): (Reading.LOST, (MoveEffect.DROP_CLAIM, MoveEffect.COMPUTE_ANEW)),
    (Reading.AT_TARGET, MoveEvent.TARGET_LOST): (Reading.LOST, (MoveEffect.COMPUTE_ANEW,)),
}


def advance(reading: Reading, event: MoveEvent) -> tuple[Reading, tuple[MoveEffect, ...]]:
    """The next state and what to do; what comes late changes nothing."""
    return _NEXT.get((reading, event), (reading, ()))
