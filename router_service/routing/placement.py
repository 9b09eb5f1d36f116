"""Which instance of a tier takes a request. No I/O."""

import zlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from services.domain.instances import InstanceRecord
from services.domain.stages.places import by_preference, occupancy


@dataclass(frozen=True, slots=True)
class Placed:
    """The instance to try, and why this one."""

    record: InstanceRecord
    reason: str


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """Nobody can take it now. `full`: there are instances, but each is full; otherwise none is fit to try."""

    full: bool


def place(
    candidates: Seq[InstanceRecord],
    *,
    request_id: str,
    tokens: int,
    under_way: Mapping[str, int],
    full: AbstractSet[str],
    ejected: AbstractSet[str],
    avoid: str = "",
    prefix_holder: str = "",
) -> Placed | NotPlaced:
    """The least loaded of `candidates`, within the length stage that suits the request best and has room.

    tokens: the request's length, prompt and what has been generated. The earliest stage that covers it comes first, then
    the later ones; without stages all are one.
    under_way: requests by instance id that this router sent and the instance's record cannot know of yet.
    full: instances that refused a moment ago for want of room. ejected: instances that failed a moment ago.
    avoid: the instance just left; taken only if it is the only one.
    prefix_holder: the instance that knows the prompt's beginning; what it need not compute counts as one request less there.
    Load is requests there per place, one that waits or is under way counted as `PROMPT_WEIGHT`; ties fall by tokens there,
    then by a checksum of instance and request, so that requests spread evenly and the same request always falls the same way.
    """
    fit = [c for c in candidates if c.instance_id not in ejected]
    if not fit:
        return NotPlaced(full=False)
    free = [c for c in fit if c.instance_id not in full and _load(c, under_way) < 1.0]
    if not free:
        return NotPlaced(full=True)
    others = [c for c in free if c.instance_id != avoid] or free

    def cost(c: InstanceRecord) -> tuple[float, bool, int, int]:
        held, known = c.load.tokens if c.load is not None else 0, c.instance_id == prefix_holder
        sent, waiting = under_way.get(c.instance_id, 0), len(c.load.queued_tokens) if c.load is not None else 0
        busy = occupancy(_requests(c) + sent, waiting + sent)
        return (busy - known) / _places(c), not known, held, zlib.crc32(f"{c.instance_id}/{request_id}".encode())

    by_id = {c.instance_id: c for c in others}
    group = by_preference({i: c.place for i, c in by_id.items()}, tokens)[0]
    best = min((by_id[i] for i in group), key=cost)
    if len(group) == 1:
        return Placed(best, "only_one")
    return Placed(best, "prefix_known" if best.instance_id == prefix_holder else "least_loaded")


def _load(record: InstanceRecord, under_way: Mapping[str, int]) -> float:
    """Requests there over places there; 1 or more is full."""
    return (_requests(record) + under_way.get(record.instance_id, 0)) / _places(record)


def _requests(record: InstanceRecord) -> int:
    return record.load.requests if record.load is not None else 0


def _places(record: InstanceRecord) -> int:
    return max(1, record.model.max_requests) if record.model is not None else 1
