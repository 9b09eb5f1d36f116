"""The other instances as one router sees them: who is there, who failed or refused a moment ago, what is on its way."""

import asyncio
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from types import TracebackType

from router_service.domain.failures import FAILURES_TO_EJECT, Ejection
from router_service.routing.place_queue import PlaceQueue
from router_service.routing.placement import Candidate, NotPlaced, Placed, SloNeed, free_places, place
from router_service.routing.prefix_affinity import PrefixAffinity
from services.domain.instances import InstanceRecord, Role
from services.domain.mesh_view import MeshView

MIN_FULL_S, MAX_FULL_S = 0.05, 1.0
"""How long an instance that refused for want of room is left alone: its own hint, within these bounds."""


class SentRequest(AbstractContextManager["SentRequest"]):
    """A request that is at an instance as long as the context lasts; known by when it was sent there."""

    __slots__ = ("_at_s", "_instance_id", "_sent")

    def __init__(self, sent: dict[str, list[float]], instance_id: str) -> None:
        self._sent, self._instance_id = sent, instance_id

    def __enter__(self) -> "SentRequest":
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def move(self, instance_id: str) -> None:
        """The request is at another instance from now on."""
        self._end()
        self._instance_id = instance_id
        self._begin()

    def _begin(self) -> None:
        self._at_s = asyncio.get_running_loop().time()
        self._sent.setdefault(self._instance_id, []).append(self._at_s)

    def _end(self) -> None:
        times = self._sent[self._instance_id]
        times.remove(self._at_s)
        if not times:
            del self._sent[self._instance_id]


_NOBODY: frozenset[str] = frozenset()


class InstancePool:
    """Reads the view; keeps what only this router knows. All times are the event loop's."""

    def __init__(self, view: MeshView, ejection_s: float) -> None:
        self.view = view
        self._ejection_s = ejection_s
        self._ejected_until: dict[str, float] = {}
        self._full_until: dict[str, float] = {}
        # By instance: the requests that failed there since the last success.
        self._failed_requests: defaultdict[str, set[str]] = defaultdict(set)
        self._sent: dict[str, list[float]] = {}  # by instance: when the requests that it has were sent, in order
        self._known: dict[str, Candidate] = {}  # by instance
        self._candidates: dict[tuple[str, bool], list[Candidate]] = {}  # by tier, with a lease or without
        self._candidates_version = -1
        self._changed: asyncio.Event | None = None  # where somebody waits for it
        self._queue = PlaceQueue(self._room, self.wait_s)
        self.prefix_affinity = PrefixAffinity()

    def view_changed(self) -> None:
        """Wake those who wait for any change, and as many of those who wait for a place as there is room for."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        self._queue.wake()

    async def change(self, within_s: float) -> None:
        """Return at the next change of the view, or after so long."""
        if self._changed is None:
            self._changed = asyncio.Event()
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def number(self) -> int:
        """A request's place in line for an instance, to be kept until it has one."""
        return self._queue.number()

    async def wait_for_place(self, tier: str, number: int, until_s: float) -> None:
        """Return when the request with this number should try again to be placed, at the latest at `until_s`."""
        await self._queue.wait(tier, number, until_s)

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
        """An instance of the tier for a request of so many tokens, prompt and output so far.

        Those whose lease has ended are tried where no instance with a lease is fit to try and has room.
        """
        result = self._place(self._workers(tier), request_id, tokens, avoid, prefix_holder, slo)
        if isinstance(result, Placed):
            return result
        last_resort = self._place(self._workers(tier, expired=True), request_id, tokens, avoid, prefix_holder, slo)
        return last_resort if isinstance(last_resort, Placed) else NotPlaced(full=result.full or last_resort.full)

    def _place(
        self,
        candidates: list[Candidate],
        request_id: str,
        tokens: int,
        avoid: str,
        prefix_holder: str,
        slo: SloNeed | None,
    ) -> Placed | NotPlaced:
        if not candidates:
            return NotPlaced(full=False)
        now = asyncio.get_running_loop().time()
        return place(
            candidates,
            request_id=request_id,
            tokens=tokens,
            under_way=self._under_way(),
            full=self._current(self._full_until, now),
            ejected=self._current(self._ejected_until, now),
            avoid=avoid,
            prefix_holder=prefix_holder,
            slo=slo,
            now_s=now,
        )

    def _room(self, tier: str) -> int | None:
        """Free places of a tier; None where nobody is fit to try."""
        now = asyncio.get_running_loop().time()
        full, ejected = self._current(self._full_until, now), self._current(self._ejected_until, now)
        rooms = [
            free_places(self._workers(tier, expired=expired), under_way=self._under_way(), full=full, ejected=ejected)
            for expired in (False, True)
        ]
        return None if rooms == [None, None] else sum(room or 0 for room in rooms)

    def _workers(self, tier: str, *, expired: bool = False) -> list[Candidate]:
        """The candidates of a tier, made anew only for records that are new."""
        if self._candidates_version != self.view.version:
            self._candidates_version = self.view.version
            self._candidates.clear()
        candidates = self._candidates.get((tier, expired))
        if candidates is None:
            records = self.view.expired_workers(tier) if expired else self.view.workers(tier)
            candidates = self._candidates[tier, expired] = [self._candidate(record) for record in records]
        return candidates

    def _candidate(self, record: InstanceRecord) -> Candidate:
        known = self._known.get(record.instance_id)
        if known is None or known.record is not record:
            if known is None:  # a new one: those that have gone are forgotten
                self._known = {i: c for i, c in self._known.items() if self.view.find(i) is not None}
            known = self._known[record.instance_id] = Candidate.of(record)
        return known

    def _under_way(self) -> dict[str, int]:
        """Requests by instance that were sent after the instance's record came."""
        sent = {i: len(times) - bisect_right(times, self.view.heard_at_s(i)) for i, times in self._sent.items()}
        return {i: count for i, count in sent.items() if count}

    def sending(self, instance_id: str) -> "SentRequest":
        """A request is at an instance as long as the context lasts."""
        return SentRequest(self._sent, instance_id)

    def eject(self, instance_id: str) -> None:
        """It failed: others are tried first for a while."""
        self._ejected_until[instance_id] = asyncio.get_running_loop().time() + self._ejection_s

    def record_failure(self, instance_id: str, request_id: str, ejection: Ejection) -> None:
        """Carry out what the table of failures says of an instance at which this request failed."""
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
        """It has completed a reply: failures before that were not in a row."""
        self._failed_requests.pop(instance_id, None)

    def is_leaving(self, instance_id: str) -> bool:
        """Whether it is draining, or is known no more."""
        record = self.view.find_leased(instance_id)
        return record is None or record.draining

    def is_ejected(self, instance_id: str) -> bool:
        return instance_id in self._current(self._ejected_until, asyncio.get_running_loop().time())

    def is_full(self, instance_id: str, retry_after_s: float) -> None:
        """It refused for want of room: nothing is sent there for a while."""
        pause_s = min(max(retry_after_s, MIN_FULL_S), MAX_FULL_S)
        self._full_until[instance_id] = asyncio.get_running_loop().time() + pause_s

    def wait_s(self) -> float:
        """Until the next suspicion or refusal ends; a short while if there is none."""
        now = asyncio.get_running_loop().time()
        ends = [end for end in (*self._ejected_until.values(), *self._full_until.values()) if end > now]
        return min([end - now for end in ends] + [0.5])

    def judges(self) -> list[InstanceRecord]:
        """Judges to try, in order: those not ejected first, then by how many requests of ours they have.

        Those whose lease has ended stand in where no judge has one.
        """
        judges = [r for r in self.view.instances(Role.JUDGE) if not r.draining] or self.view.expired(Role.JUDGE)
        return sorted(
            (r for r in judges if not r.draining),
            key=lambda r: (self.is_ejected(r.instance_id), len(self._sent.get(r.instance_id, ())), r.instance_id),
        )

    @staticmethod
    def _current(until: dict[str, float], now: float) -> AbstractSet[str]:
        if not until:
            return _NOBODY
        for instance_id in [i for i, end in until.items() if end <= now]:
            del until[instance_id]
        return set(until)
