"""The step of the plan's burst ladder that each request takes: what the controller reads, and where its changes are shown.

The load is that of the whole mesh: each router publishes the arrivals that it has counted, and workers what waits there. So
all routers come to nearly the same step without asking each other.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from penstock.services.acceptance.burst_control import ArrivalRate, BurstController, StepChange
from penstock.services.acceptance.bursts import tie_accepted, tie_draw
from penstock.services.counters import LabelledCounter
from penstock.services.domain.instances import Load, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.types.mesh_status import BurstChange, BurstCounts
from penstock.types.plans import Plan
from penstock.types.rules import BurstStep

_log = logging.getLogger(__name__)

OBSERVE_S = 0.1  # between two looks at the load: the view is brought up to date as often
KEPT_CHANGES = 10


@dataclass(frozen=True, slots=True)
class TakenStep:
    """The step of one request. index: in the ladder."""

    index: int
    step: BurstStep

    def tie_accepted(self, seed: int, tier: int) -> bool:
        """Whether the request's answer of this tier, counted from 0, is accepted if it scores exactly the threshold."""
        return tie_accepted(self.step.thresholds[tier].tie_share, tie_draw(seed, tier))


class BurstSteps:
    """The controller of the current plan's ladder, in one router process. Times are the event loop's."""

    def __init__(self, view: MeshView, instance_id: str, window_s: float, meter: Meter) -> None:
        """instance_id: of this process, whose own record in the view is older than what it counts."""
        self._view, self._instance_id, self._window_s = view, instance_id, window_s
        self._arrivals = ArrivalRate()
        self._controller: BurstController | None = None
        self._observed_s = float("-inf")
        self._changes = 0
        self.last_changes: deque[BurstChange] = deque(maxlen=KEPT_CHANGES)
        """(Unix time, change), the last one first."""
        reasons, steps = ("penstock.reason",), ("penstock.burst_step",)
        self._changed = LabelledCounter(meter, "penstock.router.burst_changes", reasons, unit="{change}")
        self._requests = LabelledCounter(meter, "penstock.router.burst_requests", steps, unit="{request}")
        meter.create_observable_gauge("penstock.router.burst_step", callbacks=[self._gauge], unit="1")

    def arrived(self, count: int) -> None:
        """Count requests of the cascade that have just come, served or not."""
        self._arrivals.arrived(asyncio.get_running_loop().time(), count)

    def take(self, plan: Plan) -> TakenStep | None:
        """The step of a request that begins now; None if the plan has no ladder."""
        controller, now_s = self._current(plan), asyncio.get_running_loop().time()
        if controller is None:
            return None
        if now_s - self._observed_s >= OBSERVE_S:
            self._observe(controller, now_s)
        index, change = controller.take(now_s)
        self._note(change)
        self._requests.add(1, str(index))
        return TakenStep(index, controller.ladder.steps[index])

    def load(self) -> Load:
        """What this router publishes."""
        if self._view.plan is None or self._view.plan.burst is None:
            return Load()
        return Load(arrivals_per_s=self._arrivals.per_s(asyncio.get_running_loop().time()))

    def arrivals_per_s(self) -> float:
        """At all routers of the mesh: counted here, as published by the others."""
        others = (
            record.load.arrivals_per_s
            for record in self._view.instances()
            if record.role is Role.ROUTER and record.instance_id != self._instance_id and record.load is not None
        )
        return self._arrivals.per_s(asyncio.get_running_loop().time()) + sum(others)

    def counts(self) -> BurstCounts | None:
        """What this process counts; None without a ladder."""
        controller = self._current(self._view.plan) if self._view.plan is not None else None
        if controller is None:
            return None
        now_s = asyncio.get_running_loop().time()
        self._observe(controller, now_s)  # without requests, this alone notices that the burst is over
        quality, requests = controller.window(now_s)
        return BurstCounts(
            controller.step,
            controller.budget_left(now_s),
            controller.out_of_budget,
            self._changes,
            requests,
            quality,
        )

    def _current(self, plan: Plan) -> BurstController | None:
        """The controller for a plan. One for another ladder begins without a budget."""
        if plan.burst is None:
            self._controller = None
        elif self._controller is None or self._controller.ladder != plan.burst:
            self._controller = BurstController(plan.burst, self._window_s)
        return self._controller

    def _observe(self, controller: BurstController, now_s: float) -> None:
        self._observed_s = now_s
        self._note(controller.observe(now_s, self.arrivals_per_s(), self._queued))

    def _queued(self, tier: str) -> int:
        """Requests that wait at the workers of a tier for a place in a batch."""
        return sum(len(w.load.queued_tokens) for w in self._view.workers(tier) if w.load is not None)

    def _note(self, change: StepChange | None) -> None:
        if change is None:
            return
        self._changes += 1
        self.last_changes.appendleft(BurstChange(time.time(), change.before, change.after, change.reason))
        self._changed.add(1, change.reason.value)
        _log.info("burst ladder: from step %d to step %d (%s)", change.before, change.after, change.reason.value)

    def _gauge(self, _: CallbackOptions) -> Iterable[Observation]:
        """From another thread."""
        controller = self._controller
        return [] if controller is None else [Observation(controller.step)]
