"""Which step of a plan's burst ladder each request takes: for routers, and for the simulator. No I/O: time is an argument.

The load decides which step is needed: the first that sustains the demand, which is arrivals and what is queued. A higher step
is taken at once, and left again only after the demand has been well within an earlier one for a while.

A budget decides whether the step may be taken: quality above the mean that the ladder holds is earned by a request and spent
by others. The law: whenever a request takes a step whose quality is below that mean, what was spent within the window, this
request included, is at most SPENT_AT_MOST of what was earned within it. So the mean over the window holds then. Without a
budget, the last step that holds the mean by itself is taken. Where what paid for a burst leaves the window before the burst
does, requests take step 0, whatever the load. Nothing is shared between routers: each spends what its own requests earned.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.types.mesh_status import BurstReason
from penstock.types.rules import BurstLadder, BurstStep

RATE_WINDOW_S = 5.0
"""Over which arrivals are counted: a burst of twice the rate is noticed within about two seconds."""
RATE_PARTS = 20
DRAIN_S = 10.0
"""Time within which what is queued should be served, in addition to what arrives."""
HOLD_S = 5.0
"""How long an earlier step must be enough before the ladder goes back to it."""
BACK = 0.85
"""Of the rate of an earlier step: the demand must be below it to go back. Counts of arrivals vary by chance."""
SPENT_AT_MOST = 0.8
"""Of the quality earned within the window. The rest is for windows that begin with a burst: they hold the mean if a fifth
less is earned after it than before it."""
OVERSPENT = 0.95
"""Of the quality earned within the window: where more was spent, requests take step 0, whatever the load."""
RECOVERED = 0.25
"""Share of the budget that must be free again before a router whose budget is spent gives way again."""
EPSILON = 1e-9
BUDGET_PARTS = 600
"""Parts of the window: what is older than a part more than the window is forgotten part by part."""


@dataclass(frozen=True, slots=True)
class StepChange:
    """The step that new requests take has changed."""

    before: int
    after: int
    reason: BurstReason


class SlidingSums:
    """Two sums over the last `window_s` seconds, in `parts` parts: what is older is forgotten part by part."""

    def __init__(self, window_s: float, parts: int) -> None:
        self._part_s, self._parts = window_s / parts, parts
        self._first = [0.0] * parts
        self._second = [0.0] * parts
        self._part = 0
        self.first = self.second = 0.0

    def add(self, now_s: float, first: float, second: float = 0.0) -> None:
        self.advance(now_s)
        at = self._part % self._parts
        self._first[at] += first
        self._second[at] += second
        self.first += first
        self.second += second

    def advance(self, now_s: float) -> None:
        """Forget what is too old. now_s: not before earlier calls."""
        part = int(now_s / self._part_s)
        if part <= self._part:
            return
        for old in range(max(self._part + 1, part - self._parts + 1), part + 1):
            self._first[old % self._parts] = self._second[old % self._parts] = 0.0
        self._part = part
        self.first, self.second = sum(self._first), sum(self._second)


class ArrivalRate:
    """Arrivals per second over RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._counts = SlidingSums(RATE_WINDOW_S, RATE_PARTS)

    def arrived(self, now_s: float, count: int = 1) -> None:
        self._counts.add(now_s, count)

    def per_s(self, now_s: float) -> float:
        self._counts.advance(now_s)
        return self._counts.first / RATE_WINDOW_S


class BurstController:
    """The state of one ladder in one router process, or in a simulation."""

    def __init__(self, ladder: BurstLadder, window_s: float) -> None:
        self.ladder = ladder
        self._budget = SlidingSums(window_s, BUDGET_PARTS)  # earned, spent
        self._quality = SlidingSums(window_s, BUDGET_PARTS)  # sum, requests
        self._needed = 0
        self._calm_since_s: float | None = None
        self._calm_step = 0
        self._limited = False  # a step was refused by the budget, which has not recovered since
        self._overspent = (
            False  # what paid for the steps of the window has left it, and the budget has not recovered since
        )

    @property
    def step(self) -> int:
        """The step that new requests take, unless the next one finds the budget spent."""
        if self._overspent:
            return 0
        return self._holding(self._needed) if self._limited else self._needed

    @property
    def out_of_budget(self) -> bool:
        """Whether the load needs a step that the budget does not allow."""
        return self.step < self._needed

    def window(self, now_s: float) -> tuple[float, int]:
        """(sum of the planned qualities of the requests of the window, their number)."""
        self._quality.advance(now_s)
        return self._quality.first, round(self._quality.second)

    def budget_left(self, now_s: float) -> float:
        """The share of the window's budget that is not spent, 0 to 1; 0 where nothing was earned."""
        self._budget.advance(now_s)
        allowed = SPENT_AT_MOST * self._budget.first
        return max(0.0, 1 - self._budget.second / allowed) if allowed > 0 else 0.0

    def observe(self, now_s: float, arrivals_per_s: float, queued: Callable[[str], int]) -> StepChange | None:
        """Take note of the load of the mesh; the change of the step, if it has changed.

        queued: requests that wait at the workers of a tier.
        """
        before = self.step

        def enough(most: int, share: float) -> int:
            """The first step up to `most` that sustains the demand with a share of its rate; `most` if none does."""
            for i, step in enumerate(self.ladder.steps[:most]):
                if _demand_per_s(step, arrivals_per_s, queued) <= share * step.rate_per_s:
                    return i
            return most

        self._needed = max(self._needed, enough(len(self.ladder.steps) - 1, 1.0))
        reason = BurstReason.LOAD
        earlier = enough(self._needed, BACK)
        if earlier == self._needed:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s, self._calm_step = now_s, earlier
        else:
            self._calm_step = max(self._calm_step, earlier)
            if now_s - self._calm_since_s >= HOLD_S:
                self._needed, self._calm_since_s = self._calm_step, None
                reason = BurstReason.CALM
        if (settled := self._settle(now_s)) is not None:
            reason = settled
        return StepChange(before, self.step, reason) if self.step != before else None

    def take(self, now_s: float) -> tuple[int, StepChange | None]:
        """(the step of a request that begins now, the change if the budget changes it). The request counts from now on."""
        before = self.step
        reason = self._settle(now_s)
        deficit = self.ladder.mean_quality - self.ladder.steps[self.step].quality
        if deficit > 0 and self._budget.second + deficit > SPENT_AT_MOST * self._budget.first:
            self._limited, reason = True, BurstReason.BUDGET_SPENT
        step = self.step
        quality = self.ladder.steps[step].quality
        surplus = quality - self.ladder.mean_quality
        self._budget.add(now_s, max(0.0, surplus), max(0.0, -surplus))
        self._quality.add(now_s, quality, 1)
        return step, StepChange(before, step, reason) if step != before and reason is not None else None

    def _settle(self, now_s: float) -> BurstReason | None:
        """Bring the budget up to date; why the step may have changed by that."""
        self._budget.advance(now_s)
        earned, spent = self._budget.first, self._budget.second
        if not self._overspent and spent > OVERSPENT * earned + EPSILON:
            self._overspent = True
            return BurstReason.BUDGET_SPENT
        if (self._overspent or self._limited) and spent <= (1 - RECOVERED) * SPENT_AT_MOST * earned and earned > 0:
            self._overspent = self._limited = False
            return BurstReason.BUDGET_RECOVERED
        return None

    def _holding(self, most: int) -> int:
        """The last step up to `most` that holds the mean by itself: it needs no budget."""
        steps = self.ladder.steps
        return max(i for i in range(most + 1) if i == 0 or steps[i].quality >= self.ladder.mean_quality)


def _demand_per_s(step: BurstStep, arrivals_per_s: float, queued: Callable[[str], int]) -> float:
    """Arrivals per second that a step would have to sustain so that what is queued at its tier is served in time."""
    return arrivals_per_s + queued(step.tier) / step.tier_share / DRAIN_S
