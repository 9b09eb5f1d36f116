"""The other instances as one router sees them: which exist, which failed or refused, and the requests sent there."""

import asyncio
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from penstock.router_service.domain.failures import FAILURES_TO_EJECT, Ejection
from penstock.router_service.routing.place_queue import PlaceQueue
from penstock.router_service.routing.placement import NotPlaced, Placed, PlacementCandidate, SloNeed, free_places, place
from penstock.router_service.routing.prefix_affinity import PrefixAffinity
from penstock.services.domain.dispatch import NOTHING_SENT, Sent, delay_s, sent_tokens
from penstock.services.domain.instances import InstanceRecord, Role
from penstock.services.domain.mesh_view import MeshView

SAMPLE_OF_STAGE = 32
"""Instances of a stage that are compared for one request. The best of so many is nearly the best of all, costs the same
however large the tier is, and differs from request to request: routers do not all choose the same instance."""
STAGES_COMPARED = 2
"""Stages that are sampled: the one that covers the length, and the next one, which may take the request."""
MIN_FULL_S, MAX_FULL_S = 0.05, 1.0
"""How long an instance that was full gets no requests: its own hint, within these bounds."""


class SentRequest(AbstractContextManager["SentRequest"]):
    """A request that is at an instance as long as the context lasts; known by when it was sent there."""

    __slots__ = ("_at_s", "_instance_id", "_sent", "_tokens")

    def __init__(self, sent: dict[str, list[tuple[float, int]]], instance_id: str, tokens: int) -> None:
        self._sent, self._instance_id, self._tokens = sent, instance_id, tokens

    def __enter__(self) -> "SentRequest":
        self._at_s = asyncio.get_running_loop().time()
        self._sent.setdefault(self._instance_id, []).append((self._at_s, self._tokens))
        return self

    def __exit__(self, *_: object) -> None:
        sent = self._sent[self._instance_id]
        sent.remove((self._at_s, self._tokens))
        if not sent:
            del self._sent[self._instance_id]

    def move(self, instance_id: str) -> None:
        """The request is at another instance from now on, with its KV."""
        self.__exit__()
        self._instance_id, self._tokens = instance_id, 0
        self.__enter__()


_NO_INSTANCES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _StageMembers:
    """The instances of a length stage, in order of id. to_tokens: the greatest boundary; infinite without stages."""

    to_tokens: float
    instance_ids: list[str]
    members: frozenset[str]

    def window(self, first: int) -> list[str]:
        """`SAMPLE_OF_STAGE` of the instances, from the one with this number on."""
        begin = first % len(self.instance_ids)
        ids = self.instance_ids[begin : begin + SAMPLE_OF_STAGE]
        return ids + self.instance_ids[: max(0, min(begin, SAMPLE_OF_STAGE - len(ids)))]


def _stages_of(workers: Iterable[InstanceRecord]) -> list[_StageMembers]:
    """The stages of a tier, in order; instances without a place are of the first."""
    by_stage: dict[int, list[InstanceRecord]] = {}
    for record in workers:
        by_stage.setdefault(record.place.stage if record.place is not None else -1, []).append(record)
    if -1 in by_stage and len(by_stage) > 1:
        by_stage[min(stage for stage in by_stage if stage >= 0)].extend(by_stage.pop(-1))
    return [
        _StageMembers(
            max(record.place.to_tokens if record.place is not None else math.inf for record in records),
            [record.instance_id for record in records],
            frozenset(record.instance_id for record in records),
        )
        for _, records in sorted(by_stage.items())
    ]


class InstancePool:
    """Reads the view, and keeps the state that only this router has. All times are the event loop's."""

    def __init__(self, view: MeshView, ejection_s: float) -> None:
        self.view = view
        self._ejection_s = ejection_s
        self._ejected_until: dict[str, float] = {}
        self._full_until: dict[str, float] = {}
        # By instance: the requests that failed there since the last success.
        self._failed_requests: defaultdict[str, set[str]] = defaultdict(set)
        # By instance: when the requests that it has were sent, in order, and the tokens of their prompts.
        self._sent: dict[str, list[tuple[float, int]]] = {}
        self._known: dict[str, PlacementCandidate] = {}  # by instance
        self._known_version = -1
        self._candidates: dict[tuple[str, bool], list[PlacementCandidate]] = {}  # by tier, with a lease or without
        self._candidates_version = -1
        # By tier, with a lease; empty for a tier without many instances.
        self._stages: dict[str, list[_StageMembers]] = {}
        self._stages_version = -1
        self._changed = asyncio.Event()  # set, and replaced, at each change of the view
        self.queue = PlaceQueue(self._room, self.wait_s)
        self.prefix_affinity = PrefixAffinity()

    def view_changed(self) -> None:
        """Wake tasks that wait for any change, and as many requests that wait for a place as there is room for."""
        self._changed.set()
        self._changed = asyncio.Event()
        self.queue.wake()

    async def change(self, within_s: float) -> None:
        """Return at the next change of the view, or after `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()

    def place(
        self,
        tier: str,
        request_id: str,
        tokens: int,
        *,
        avoid: str = "",
        prefix_holder: str = "",
        slo: SloNeed | None = None,
    ) -> Placed | NotPlaced:
        """An instance of the tier for a request. tokens: of its prompt and its output so far.

        Instances whose lease has expired are used if no instance with a lease can be tried and has room. Of a large tier, a
        sample is compared first; all are if none of it can be tried and has room, or if the request has an SLO.
        """
        now_s = asyncio.get_running_loop().time()

        def placed(candidates: list[PlacementCandidate]) -> Placed | NotPlaced:
            return place(
                candidates,
                request_id=request_id,
                tokens=tokens,
                in_flight=self._in_flight(c.instance_id for c in candidates),
                full=self._current(self._full_until, now_s),
                ejected=self._current(self._ejected_until, now_s),
                avoid=avoid,
                prefix_holder=prefix_holder,
                slo=slo,
                now_s=now_s,
            )

        if slo is None and (sample := self._sample(tier, request_id, tokens, prefix_holder)):
            sampled = placed(sample)
            if isinstance(sampled, Placed):
                return sampled
        result = placed(self._workers(tier))
        if isinstance(result, Placed):
            return result
        last_resort = placed(self._workers(tier, expired=True))
        return last_resort if isinstance(last_resort, Placed) else NotPlaced(full=result.full or last_resort.full)

    def delay_s(self, tier: str, answer_tokens: float) -> float:
        """By which the work that is pending at the least busy instance of a tier delays an answer of so many tokens.

        0 where no instance can be tried. Of a large tier, some instances are compared.
        """
        ejected = self._current(self._ejected_until, asyncio.get_running_loop().time())
        workers = [c for c in self._workers(tier) if c.instance_id not in ejected][:SAMPLE_OF_STAGE]
        in_flight = self._in_flight(c.instance_id for c in workers)
        delays = []
        for candidate in workers:
            sent = in_flight.get(candidate.instance_id, NOTHING_SENT)
            prompts, work = candidate.prompt_tokens + sent.tokens, candidate.work + sent_tokens(sent)
            delays.append(delay_s(answer_tokens, prompts, work, candidate.prompt_tokens_per_s))
        return min(delays, default=0.0)

    def _room(self, tier: str) -> int | None:
        """Number of free places of a tier; None if no instance can be tried."""
        now = asyncio.get_running_loop().time()
        full, ejected = self._current(self._full_until, now), self._current(self._ejected_until, now)
        rooms = [
            free_places(workers, in_flight=self._in_flight(c.instance_id for c in workers), full=full, ejected=ejected)
            for workers in (self._workers(tier), self._workers(tier, expired=True))
        ]
        return None if rooms == [None, None] else sum(room or 0 for room in rooms)

    def _workers(self, tier: str, *, expired: bool = False) -> list[PlacementCandidate]:
        """The candidates of a tier, computed again only for new records."""
        if self._candidates_version != self.view.version:
            self._candidates_version = self.view.version
            self._candidates.clear()
        candidates = self._candidates.get((tier, expired))
        if candidates is None:
            records = self.view.expired_workers(tier) if expired else self.view.workers(tier)
            candidates = self._candidates[tier, expired] = [self._candidate(record) for record in records]
        return candidates

    def _sample(self, tier: str, request_id: str, tokens: int, prefix_holder: str) -> list[PlacementCandidate]:
        """Some instances of the stages that may take a request, and the prefix holder; none for a tier without many."""
        if self._stages_version != self.view.members_version:
            self._stages_version = self.view.members_version
            self._stages.clear()
        stages = self._stages.get(tier)
        if stages is None:
            stages = _stages_of(self.view.workers(tier))
            if sum(len(stage.instance_ids) for stage in stages) <= STAGES_COMPARED * SAMPLE_OF_STAGE:
                stages = []
            self._stages[tier] = stages
        if not stages:
            return []
        covering = [stage for stage in stages if tokens < stage.to_tokens][:STAGES_COMPARED] or stages[-1:]
        first = zlib.crc32(request_id.encode())
        chosen = {instance_id for stage in covering for instance_id in stage.window(first)}
        if any(prefix_holder in stage.members for stage in covering):
            chosen.add(prefix_holder)
        records = (self.view.find(instance_id) for instance_id in sorted(chosen))
        return [self._candidate(record) for record in records if record is not None]

    def _candidate(self, record: InstanceRecord) -> PlacementCandidate:
        known = self._known.get(record.instance_id)
        if known is None or known.record is not record:
            if known is None and self._known_version != self.view.members_version:  # new: remove those that have left
                self._known_version = self.view.members_version
                self._known = {i: c for i, c in self._known.items() if self.view.find(i) is not None}
            known = self._known[record.instance_id] = PlacementCandidate.of(record)
        return known

    def _in_flight(self, instance_ids: Iterable[str]) -> dict[str, Sent]:
        """The requests sent to each of these instances after its latest record."""
        in_flight: dict[str, Sent] = {}
        for instance_id in instance_ids:
            sent = self._sent.get(instance_id)
            if sent is None or sent[-1][0] <= (heard_at_s := self.view.heard_at_s(instance_id)):
                continue
            requests = tokens = 0
            for at_s, prompt_tokens in reversed(sent):
                if at_s <= heard_at_s:
                    break
                requests, tokens = requests + 1, tokens + prompt_tokens
            in_flight[instance_id] = Sent(requests, tokens)
        return in_flight

    def sending(self, instance_id: str, tokens: int = 0) -> "SentRequest":
        """A request is at an instance as long as the context lasts. tokens: of its prompt and its output so far."""
        return SentRequest(self._sent, instance_id, tokens)

    def eject(self, instance_id: str) -> None:
        """It failed: others are tried first for `ejection_s`."""
        self._ejected_until[instance_id] = asyncio.get_running_loop().time() + self._ejection_s

    def readmit(self, instance_id: str) -> None:
        """End an ejection: the instance has answered."""
        self._ejected_until.pop(instance_id, None)
        self.view_changed()

    def record_failure(self, instance_id: str, request_id: str, ejection: Ejection) -> None:
        """Apply the table of failures to an instance on which this request failed."""
        if ejection is Ejection.REPEATED:
            failed = self._failed_requests[instance_id]
            failed.add(request_id)
            if len(failed) < FAILURES_TO_EJECT:
                return
        elif ejection is Ejection.NEVER:
            return
        self._failed_requests.pop(instance_id, None)
        self.eject(instance_id)

    def succeeded(self, instance_id: str) -> None:
        """It has completed a reply: earlier failures are not consecutive any more."""
        self._failed_requests.pop(instance_id, None)

    def is_leaving(self, instance_id: str) -> bool:
        """Whether it is draining, or has left the mesh."""
        record = self.view.find_leased(instance_id)
        return record is None or record.draining

    def is_ejected(self, instance_id: str) -> bool:
        return instance_id in self._current(self._ejected_until, asyncio.get_running_loop().time())

    def is_full(self, instance_id: str, retry_after_s: float) -> None:
        """It refused because it is full: it gets no requests for a while."""
        pause_s = min(max(retry_after_s, MIN_FULL_S), MAX_FULL_S)
        self._full_until[instance_id] = asyncio.get_running_loop().time() + pause_s

    def wait_s(self) -> float:
        """Time until the next ejection or refusal ends; half a second if there is none."""
        now = asyncio.get_running_loop().time()
        ends = [end for end in (*self._ejected_until.values(), *self._full_until.values()) if end > now]
        return min([end - now for end in ends] + [0.5])

    def judges(self) -> list[InstanceRecord]:
        """Judges to try, in order: those not ejected first, then by the number of our requests there.

        Judges whose lease has expired are used if none has a lease.
        """
        judges = [r for r in self.view.instances(Role.JUDGE) if not r.draining] or self.view.expired(Role.JUDGE)
        return sorted(
            (r for r in judges if not r.draining),
            key=lambda r: (self.is_ejected(r.instance_id), len(self._sent.get(r.instance_id, ())), r.instance_id),
        )

    @staticmethod
    def _current(until: dict[str, float], now: float) -> AbstractSet[str]:
        if not until:
            return _NO_INSTANCES
        for instance_id in [i for i, end in until.items() if end <= now]:
            del until[instance_id]
        return set(until)
