"""The other instances as one router sees them: which exist, which failed or refused, and the requests sent there."""

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
"""How long an instance that was full gets no requests: its own hint, within these bounds."""


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


_NO_INSTANCES: frozenset[str] = frozenset()


class InstancePool:
    """Reads the view, and keeps the state that only this router has. All times are the event loop's."""

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
        self._changed: asyncio.Event | None = None  # if a task waits for it
        self._queue = PlaceQueue(self._room, self.wait_s)
        self.prefix_affinity = PrefixAffinity()

    def view_changed(self) -> None:
        """Wake tasks that wait for any change, and as many requests that wait for a place as there is room for."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        self._queue.wake()

    async def change(self, within_s: float) -> None:
        """Return at the next change of the view, or after `within_s`."""
        if self._changed is None:
            self._changed = asyncio.Event()
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def number(self) -> int:
        """A request's number in the queue for places, valid until it has one."""
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
        """An instance of the tier for a request. tokens: of its prompt and its output so far.

        Instances whose lease has expired are used if no instance with a lease can be tried and has room.
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
            in_flight=self._in_flight(),
            full=self._current(self._full_until, now),
            ejected=self._current(self._ejected_until, now),
            avoid=avoid,
            prefix_holder=prefix_holder,
            slo=slo,
            now_s=now,
        )

    def _room(self, tier: str) -> int | None:
        """Number of free places of a tier; None if no instance can be tried."""
        now = asyncio.get_running_loop().time()
        full, ejected = self._current(self._full_until, now), self._current(self._ejected_until, now)
        rooms = [
            free_places(self._workers(tier, expired=expired), in_flight=self._in_flight(), full=full, ejected=ejected)
            for expired in (False, True)
        ]
        return None if rooms == [None, None] else sum(room or 0 for room in rooms)

    def _workers(self, tier: str, *, expired: bool = False) -> list[Candidate]:
        """The candidates of a tier, computed again only for new records."""
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
            if known is None:  # new: remove those that have left
                self._known = {i: c for i, c in self._known.items() if self.view.find(i) is not None}
            known = self._known[record.instance_id] = Candidate.of(record)
        return known

    def _in_flight(self) -> dict[str, int]:
        """Number of requests sent to each instance after its latest record."""
        sent = {i: len(times) - bisect_right(times, self.view.heard_at_s(i)) for i, times in self._sent.items()}
        return {i: count for i, count in sent.items() if count}

    def sending(self, instance_id: str) -> "SentRequest":
        """A request is at an instance as long as the context lasts."""
        return SentRequest(self._sent, instance_id)

    def eject(self, instance_id: str) -> None:
        """It failed: others are tried first for `ejection_s`."""
        self._ejected_until[instance_id] = asyncio.get_running_loop().time() + self._ejection_s

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
