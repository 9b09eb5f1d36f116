"""Which of two instances a reply is read from while it moves. No I/O.

    AT_SOURCE --begun--> MOVING --source handed over--> AT_TARGET
        ^                  |  |
        +-- move failed ---+  +-- source lost --> ORPHANED --target admitted--> AT_TARGET
        |                  |                         |
        |             report lost                    +-- target lost, move failed --> LOST
        |                  v
        +-- source      UNCERTAIN (otherwise like MOVING)
            continued,
            target lost

Exactly one instance is read in every state except LOST, after which the reply is recomputed on another instance. The source
is read until it reports that it has handed over, however far the target is: events of the target are queued until then.
"""

import enum


class Reading(enum.Enum):
    AT_SOURCE = "at_source"
    MOVING = "moving"
    UNCERTAIN = "uncertain"
    """The stream with the source's report on the move broke: the source is dead, or only that stream is."""
    ORPHANED = "orphaned"
    AT_TARGET = "at_target"
    LOST = "lost"


class MoveEvent(enum.Enum):
    BEGUN = "begun"
    MOVE_FAILED = "move_failed"
    REPORT_LOST = "report_lost"
    SOURCE_CONTINUED = "source_continued"
    SOURCE_HANDED_OVER = "source_handed_over"
    SOURCE_LOST = "source_lost"
    TARGET_ADMITTED = "target_admitted"
    TARGET_LOST = "target_lost"


class MoveEffect(enum.Enum):
    READ_TARGET = "read_target"
    CANCEL_TARGET = "cancel_target"
    """Cancel the reply at the target, running or waiting."""
    RECOMPUTE = "recompute"


_NEXT: dict[tuple[Reading, MoveEvent], tuple[Reading, tuple[MoveEffect, ...]]] = {
    (Reading.AT_SOURCE, MoveEvent.BEGUN): (Reading.MOVING, ()),
    (Reading.AT_SOURCE, MoveEvent.SOURCE_LOST): (Reading.LOST, (MoveEffect.RECOMPUTE,)),
    # the target is gone: the source handed over to a stream that is not read any more
    (Reading.AT_SOURCE, MoveEvent.SOURCE_HANDED_OVER): (Reading.LOST, (MoveEffect.RECOMPUTE,)),
    (Reading.MOVING, MoveEvent.MOVE_FAILED): (Reading.AT_SOURCE, (MoveEffect.CANCEL_TARGET,)),
    (Reading.MOVING, MoveEvent.TARGET_LOST): (Reading.AT_SOURCE, (MoveEffect.CANCEL_TARGET,)),
    (Reading.MOVING, MoveEvent.SOURCE_HANDED_OVER): (Reading.AT_TARGET, (MoveEffect.READ_TARGET,)),
    (Reading.MOVING, MoveEvent.SOURCE_LOST): (Reading.ORPHANED, ()),
    (Reading.MOVING, MoveEvent.REPORT_LOST): (Reading.UNCERTAIN, ()),
    (Reading.UNCERTAIN, MoveEvent.SOURCE_CONTINUED): (Reading.AT_SOURCE, (MoveEffect.CANCEL_TARGET,)),
    (Reading.UNCERTAIN, MoveEvent.TARGET_LOST): (Reading.AT_SOURCE, (MoveEffect.CANCEL_TARGET,)),
    (Reading.UNCERTAIN, MoveEvent.SOURCE_HANDED_OVER): (Reading.AT_TARGET, (MoveEffect.READ_TARGET,)),
    (Reading.UNCERTAIN, MoveEvent.SOURCE_LOST): (Reading.ORPHANED, ()),
    (Reading.ORPHANED, MoveEvent.TARGET_ADMITTED): (Reading.AT_TARGET, (MoveEffect.READ_TARGET,)),
    (Reading.ORPHANED, MoveEvent.TARGET_LOST): (Reading.LOST, (MoveEffect.CANCEL_TARGET, MoveEffect.RECOMPUTE)),
    # the source ended the reply and says only then that it did not move: the target would wait for it in vain
    (Reading.ORPHANED, MoveEvent.MOVE_FAILED): (Reading.LOST, (MoveEffect.CANCEL_TARGET, MoveEffect.RECOMPUTE)),
    (Reading.AT_TARGET, MoveEvent.TARGET_LOST): (Reading.LOST, (MoveEffect.RECOMPUTE,)),
}


def advance(reading: Reading, event: MoveEvent) -> tuple[Reading, tuple[MoveEffect, ...]]:
    """The next state and its effects; late events change nothing."""
    return _NEXT.get((reading, event), (reading, ()))
