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


_BOTH_ALIVE = {
    MoveEvent.TARGET_LOST: Reading.AT_SOURCE,
    MoveEvent.SOURCE_HANDED_OVER: Reading.AT_TARGET,
    MoveEvent.SOURCE_LOST: Reading.ORPHANED,
}
_NEXT: dict[Reading, dict[MoveEvent, Reading]] = {
    Reading.AT_SOURCE: {
        MoveEvent.BEGUN: Reading.MOVING,
        MoveEvent.SOURCE_LOST: Reading.LOST,
        # the target is gone: the source handed over to a stream that is not read any more
        MoveEvent.SOURCE_HANDED_OVER: Reading.LOST,
    },
    Reading.MOVING: _BOTH_ALIVE | {MoveEvent.MOVE_FAILED: Reading.AT_SOURCE, MoveEvent.REPORT_LOST: Reading.UNCERTAIN},
    Reading.UNCERTAIN: _BOTH_ALIVE | {MoveEvent.SOURCE_CONTINUED: Reading.AT_SOURCE},
    Reading.ORPHANED: {
        MoveEvent.TARGET_ADMITTED: Reading.AT_TARGET,
        MoveEvent.TARGET_LOST: Reading.LOST,
        # the source ended the reply and says only then that it did not move: the target would wait for it in vain
        MoveEvent.MOVE_FAILED: Reading.LOST,
    },
    Reading.AT_TARGET: {MoveEvent.TARGET_LOST: Reading.LOST},
    Reading.LOST: {},
}


def advance(reading: Reading, event: MoveEvent) -> Reading:
    """The next state; late events change nothing. In AT_SOURCE and LOST, the reply at a target is not needed any more."""
    return _NEXT[reading].get(event, reading)
