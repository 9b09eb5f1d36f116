"""The other instances as one router sees them: who is there, who failed or refused a moment ago, what is on its way."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from router_service.domain.failures import FAILURES_TO_EJECT, Ejection
from router_service.routing.placement import NotPlaced, Placed, place
from router_service.routing.prefix_affinity import PrefixAffinity
from services.domain.instances import InstanceRecord, Role
from services.domain.mesh_view import MeshView

MIN_FULL_S, MAX_FULL_S = 0.05, 1.0
"""How long an instance that refused for want of room is left alone: its own hint, within these bounds."""


class InstancePool:
    """Reads the view; keeps what only this router knows. All times are the event loop's."""

    def __init__(self, view: MeshView, ejection_s: float) -> None:
        self.view = view
        self._ejection_s = ejection_s
        self._ejected_until: dict[str, float] = {}
        self._full_until: dict[str, float] = {}
        # By instance: the requests that failed there since the last success.
        self._failed_requests: defaultdict[str, set[str]] = defaultdict(set)
        self._sent: defaultdict[str, list[float]] = defaultdict(list)  # by instance: when its requests were sent
        self._changed = asyncio.Event()
        self.prefix_affinity = PrefixAffinity()

    def view_changed(self) -> None:
        """Wake everybody who waits for a place."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, within_s: float) -> None:
        """Return at the next change of the view, or after so long."""
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def place(
        self, tier: str, request_id: str, tokens: int, *, avoid: str = "", prefix_holder: str = ""
    ) -> Placed | NotPlaced:
        """An instance of the tier for a request of so many tokens, prompt and output so far.

        Those whose lease has ended are tried where no instance with a lease is fit to try and has room.
        """
        result = self._place(self.view.workers(tier), request_id, tokens, avoid, prefix_holder)
        if isinstance(result, Placed):
            return result
        last_resort = self._place(self.view.expired_workers(tier), request_id, tokens, avoid, prefix_holder)
        return last_resort if isinstance(last_resort, Placed) else NotPlaced(full=result.full or last_resort.full)

    def _place(
        self, candidates: list[InstanceRecord], request_id: str, tokens: int, avoid: str, prefix_holder: str
    ) -> Placed | NotPlaced:
        now = asyncio.get_running_loop().time()
        under_way = {
            c.instance_id: sum(
                1 for at in self._sent[c.instance_id] if now - at < self.view.heard_ago_s(c.instance_id, now)
            )
            for c in candidates
        }
        return place(
            candidates,
            request_id=request_id,
            tokens=tokens,
            under_way=under_way,
            full=self._current(self._full_until, now),
            ejected=self._current(self._ejected_until, now),
            avoid=avoid,
            prefix_holder=prefix_holder,
        )

    @contextmanager
    def sending(self, instance_id: str) -> Iterator[None]:
        """A request is at an instance as long as the context lasts."""
        at = asyncio.get_running_loop().time()
        self._sent[instance_id].append(at)
        try:
            yield
        finally:
            self._sent[instance_id].remove(at)
            if not self._sent[instance_id]:
                del self._sent[instance_id]

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
        record = next((r for r in self.view.instances() if r.instance_id == instance_id), None)
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
    def _current(until: dict[str, float], now: float) -> set[str]:
        for instance_id in [i for i, end in until.items() if end <= now]:
            del until[instance_id]
        return set(until)
