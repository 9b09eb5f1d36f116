"""Which instance of a tier takes a request. No I/O."""

import zlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from penstock.services.domain.dispatch import (
    NOTHING_SENT,
    Sent,
    saved_tokens,
    sent_tokens,
    stage_for,
    wait_s,
    work_tokens,
)
from penstock.services.domain.instances import InstanceRecord
from penstock.services.domain.stages.places import by_preference
from penstock.types.values import value_type


@value_type(frozen=True, slots=True)
class Placed:
    """The instance to try, and why this one. others: further instances that could be tried and have not declined."""

    record: InstanceRecord
    reason: str
    others: int = 0


@dataclass(frozen=True, slots=True)
class SloNeed:
    """What a request with an SLO asks of an instance.

    prompt_tokens: to compute before its next token, which is due at `due_s` on the clock of `place`'s caller; infinite for
    none. declined: ids of the instances that have declined it.
    """

    prompt_tokens: int
    due_s: float
    declined: AbstractSet[str]


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """No instance can take it now. full: there are instances, but each is full; otherwise none can be tried."""

    full: bool


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """An instance as placement sees it, computed once per record for all requests.

    places: number of concurrent requests. requests: those it had when it published the record. work: theirs, as
    `work_tokens` says. prompt_tokens: of prompts that it had still to compute; prompt_tokens_per_s: how fast, 0 if unknown.
    checksum: of its id, to be continued with a request's.
    """

    record: InstanceRecord
    instance_id: str
    places: int
    requests: int
    work: float
    prompt_tokens: int
    prompt_tokens_per_s: float
    checksum: int

    @classmethod
    def of(cls, record: InstanceRecord) -> "PlacementCandidate":
        load, card = record.load, record.model
        requests, prompt_tokens = (load.requests, load.prompt_tokens) if load is not None else (0, 0)
        return cls(
            record=record,
            instance_id=record.instance_id,
            places=max(1, card.max_requests) if card is not None else 1,
            requests=requests,
            work=work_tokens(prompt_tokens, requests, load.tokens if load is not None else 0),
            prompt_tokens=prompt_tokens,
            prompt_tokens_per_s=load.prompt_tokens_per_s if load is not None else 0.0,
            checksum=zlib.crc32(f"{record.instance_id}/".encode()),
        )


def place(
    candidates: Seq[PlacementCandidate],
    *,
    request_id: str,
    tokens: int,
    in_flight: Mapping[str, Sent],
    full: AbstractSet[str],
    ejected: AbstractSet[str],
    avoid: str = "",
    prefix_holder: str = "",
    slo: SloNeed | None = None,
    now_s: float = 0.0,
) -> Placed | NotPlaced:
    """The one of `candidates` with the least pending work, within the length stage that suits the request best.

    tokens: of the request's prompt and its output so far. The earliest stage that covers it and has room comes first; the
    next one takes the request if it would wait much longer there (`stage_for`). Without stages all are one.
    in_flight: requests by instance id that this router sent after the instance's latest record.
    full: instances that refused recently because they were full. ejected: instances that failed recently.
    avoid: the instance that failed last; used only if it is the only one.
    slo: of the request; instances that can probably keep it come first, those that declined it last. now_s: the time.
    prefix_holder: the instance that has computed the beginning of the prompt; it need not compute all of it.
    Work is per place (`work_tokens`), that of the requests in flight included; ties are decided by a checksum of instance and
    request, so that requests spread evenly and reproducibly.
    """
    fit = [c for c in candidates if c.instance_id not in ejected] if ejected else candidates
    if not fit:
        return NotPlaced(full=False)
    free = [
        c
        for c in fit
        if c.requests + in_flight.get(c.instance_id, NOTHING_SENT).requests < c.places
        and not (full and c.instance_id in full)
    ]
    if not free:
        return NotPlaced(full=True)
    others = ([c for c in free if c.instance_id != avoid] or free) if avoid else free
    untried = 0
    if slo is not None:
        undeclined = [c for c in others if c.instance_id not in slo.declined]
        untried, others = max(0, len(undeclined) - 1), undeclined or others
    group = _best_stage(others, tokens, in_flight)
    if len(group) == 1:
        return Placed(group[0].record, "only_one", untried)
    saved = saved_tokens(tokens)

    def rank(candidate: PlacementCandidate) -> tuple[bool, float, bool]:
        sent = in_flight.get(candidate.instance_id, NOTHING_SENT)
        is_holder = candidate.instance_id == prefix_holder
        work = candidate.work + sent_tokens(sent) - saved * is_holder
        misses = slo is not None and not _can_keep(candidate, slo, now_s, sent.requests)
        return misses, work / candidate.places, not is_holder

    ranks = [rank(c) for c in group]
    least = min(ranks)
    equals = [c for c, rank in zip(group, ranks, strict=True) if rank == least]
    name = request_id.encode()
    best = equals[0] if len(equals) == 1 else min(equals, key=lambda c: zlib.crc32(name, c.checksum))
    return Placed(best.record, "prefix_known" if best.instance_id == prefix_holder else "least_work", untried)


def _can_keep(candidate: PlacementCandidate, slo: SloNeed, now_s: float, sent: int) -> bool:
    """Whether an instance can probably keep an SLO, by the headroom in its record. sent: requests that it cannot include."""
    headroom = candidate.record.load.slo if candidate.record.load is not None else None
    if headroom is None or headroom.prompt_tokens_per_s <= 0 or headroom.free_kv_tokens <= slo.prompt_tokens:
        return False
    tokens = slo.prompt_tokens * (1 + sent)  # the others are taken to be as long
    return now_s + headroom.backlog_s + tokens / headroom.prompt_tokens_per_s <= slo.due_s


def free_places(
    candidates: Iterable[PlacementCandidate],
    *,
    in_flight: Mapping[str, Sent],
    full: AbstractSet[str],
    ejected: AbstractSet[str],
) -> int | None:
    """Number of requests that `place` would place, one after another; None if no instance can be tried."""
    fit = [c for c in candidates if c.instance_id not in ejected]
    if not fit:
        return None
    return sum(
        max(0, c.places - c.requests - in_flight.get(c.instance_id, NOTHING_SENT).requests)
        for c in fit
        if c.instance_id not in full
    )


def _best_stage(
    candidates: Seq[PlacementCandidate], tokens: int, in_flight: Mapping[str, Sent]
) -> Seq[PlacementCandidate]:
    """The candidates of the length stage that takes a request with this many tokens."""
    if all(c.record.place is None for c in candidates):
        return candidates
    by_id = {c.instance_id: c for c in candidates}
    places = {i: c.record.place for i, c in by_id.items()}
    groups = by_preference(places, tokens)
    waits_s = [
        min(
            wait_s(by_id[i].prompt_tokens + in_flight.get(i, NOTHING_SENT).tokens, by_id[i].prompt_tokens_per_s)
            for i in group
        )
        for group in groups
        if (place := places[group[0]]) is None or tokens < place.to_tokens
    ]
    return [by_id[i] for i in groups[stage_for(waits_s)]]
