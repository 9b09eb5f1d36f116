"""What a plan is to reach, and how it is looked for. No I/O."""

import enum
import math
from dataclasses import dataclass

import numpy as np

from planner_service.routing.grid import MOST_TIERS
from planner_service.simulator import Dispatch
from planner_service.simulator.felt import Objective, latency_words, least_requests
from services.domain.errors import invalid

LEAST_REQUESTS = 20  # to plan on: with fewer, the 95th percentile is the slowest request
MOST_CASCADES = 1000  # that are chosen from
LEAST_PERCENTILE, PERCENTILE = 50.0, 95.0
MAX_UTILISATION = 0.75  # the usual: leaves room for a third more than the trace's rate


class Goal(enum.Enum):
    """What is made best: least latency, most quality, fewest GPUs, or the highest rate."""

    LATENCY = "latency"
    QUALITY = "quality"
    COST = "cost"
    RATE = "rate"


class Budget(enum.Enum):
    """Whether all GPUs are given to tiers (the paper's section 3.2), or only as many as help the slowest (appendix D)."""

    AT_MOST = "at-most"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Options:
    """What a plan is to reach, and how it is looked for.

    gpus: at most so many of the cluster's; None for all. min_quality: mean quality of the answers that stand.
    max_latency_s: of the objective's latency, at `percentile`. goal: None for cost where both targets are given, else for
    what has none.
    confidence: min_quality holds for new requests with this probability, see routing.confidence; None for the sample's mean.
    seed: of the split that a confidence needs. budget: EXACT gives every GPU to a tier, which the MILP decides.
    max_utilisation: of what a tier sustains, the share that its requests may take; None lets a plan be overloaded.
    skip: tiers may be passed over by predicted scores; the rule is chosen with the plan, see skip_search.
    long_answers: long answers may stand from a lower score on; the rule is chosen with the plan, see long_answer_search.
    best_answer: a request's reply may be the best of its answers instead of the last; whether it is, is chosen with the plan.
    early_error: unfinished answers are rejected by early checks, with this error on those that would stand; None: none are.
    burst_floor: also compute a burst ladder, whose steps have at least this quality; None: none. burst_mean: the quality that
    the mean holds while thresholds give way; None for min_quality.
    max_tiers: the tiers are candidates, of which a cascade has so many at most, see cascade_choice; None: it has all of them.
    min_tiers: and so many at least; None for 1.
    """

    gpus: int | None = None
    min_quality: float | None = None
    max_latency_s: float | None = None
    goal: Goal | None = None
    objective: Objective = Objective.LARGEST_TIER
    percentile: float = PERCENTILE
    confidence: float | None = None
    seed: int = 0
    dispatch: Dispatch = Dispatch.CAPACITY
    budget: Budget = Budget.AT_MOST
    max_utilisation: float | None = None
    skip: bool = False
    long_answers: bool = False
    best_answer: bool = False
    early_error: float | None = None
    burst_floor: float | None = None
    burst_mean: float | None = None
    max_tiers: int | None = None
    min_tiers: int | None = None

    @property
    def held_quality(self) -> float | None:
        """The quality that the mean holds while thresholds give way."""
        return self.min_quality if self.burst_mean is None else self.burst_mean

    @property
    def has_rules(self) -> bool:
        """Whether rules of routing are chosen with the plan."""
        return self.skip or self.long_answers or self.best_answer

    @property
    def latency_words(self) -> str:
        """The latency that is meant: `p95 end-to-end latency`."""
        return latency_words(self.objective, self.percentile)

    @property
    def least_requests(self) -> int:
        """To plan on."""
        return max(LEAST_REQUESTS, least_requests(self.percentile))

    @property
    def aim(self) -> Goal:
        if self.goal is not None:
            return self.goal
        if self.min_quality is not None:
            return Goal.LATENCY if self.max_latency_s is None else Goal.COST
        return Goal.QUALITY

    def check(self, tiers: int) -> None:
        """InvalidRequest naming the option that does not go with the others, or that is out of bounds."""
        if self.min_quality is None and self.max_latency_s is None:
            raise invalid("target", "give min_quality, max_latency_s or both")
        if self.min_quality is not None and not 0 <= self.min_quality <= 100:
            raise invalid("min_quality", f"must be from 0 to 100, not {self.min_quality:g}")
        if self.max_latency_s is not None and not 0 < self.max_latency_s < np.inf:
            raise invalid("max_latency_s", f"must be a number of seconds over 0, not {self.max_latency_s:g}")
        if not LEAST_PERCENTILE <= self.percentile < 100:
            raise invalid("percentile", f"must be from {LEAST_PERCENTILE:g} to less than 100, not {self.percentile:g}")
        if self.dispatch is Dispatch.PENDING_WORK:
            raise invalid("dispatch", "plans are made with capacity or round-robin; pending-work is for simulations")
        if self.max_utilisation is not None and not 0 < self.max_utilisation <= 1:
            raise invalid("max_utilisation", f"must be over 0 and at most 1, not {self.max_utilisation:g}")
        if self.aim in (Goal.LATENCY, Goal.COST) and self.min_quality is None:
            raise invalid("min_quality", f"is needed where the goal is {self.aim.value}")
        if self.aim is not Goal.LATENCY and self.max_latency_s is None:
            raise invalid("max_latency_s", f"is needed where the goal is {self.aim.value}")
        self._check_burst()
        self._check_candidates(tiers)
        if self.early_error is not None and not 0 < self.early_error < 1:
            raise invalid("early_error", f"must be over 0 and under 1, not {self.early_error:g}")
        if self.early_error is not None and (self.confidence is not None or self.max_tiers is not None):
            raise invalid("early_error", "goes without confidence and max_tiers")
        if self.confidence is not None and self.min_quality is None:
            raise invalid("confidence", "is about min_quality, which is not given")
        if self.confidence is not None and self.aim is not Goal.LATENCY:
            raise invalid("confidence", "goes with the goal latency")
        most = tiers if self.max_tiers is None else self.max_tiers
        felt = self.objective is not Objective.LARGEST_TIER
        if felt and (self.confidence is not None or most > MOST_TIERS):
            raise invalid(
                "objective", f"{self.objective.value} goes without a confidence, and with up to {MOST_TIERS} tiers"
            )
        if self.budget is Budget.EXACT and (felt or self.aim is Goal.COST):
            raise invalid(
                "budget", "exact goes with the largest tier's latency as objective, and not with the goal cost"
            )

    def _check_candidates(self, tiers: int) -> None:
        if self.max_tiers is None:
            if self.min_tiers is not None:
                raise invalid("min_tiers", "goes with max_tiers, which is not given")
            return
        if not 1 <= self.max_tiers <= tiers:
            raise invalid("max_tiers", f"must be from 1 to the number of candidates, {tiers}, not {self.max_tiers}")
        least = 1 if self.min_tiers is None else self.min_tiers
        if not 1 <= least <= self.max_tiers:
            raise invalid("min_tiers", f"must be from 1 to max_tiers, {self.max_tiers}, not {least}")
        cascades = 0
        for count in range(least, self.max_tiers + 1):
            cascades += math.comb(tiers, count)
            if cascades > MOST_CASCADES:
                sizes = f"{least} to {self.max_tiers} of {tiers} candidates"
                raise invalid("max_tiers", f"{sizes} are more than {MOST_CASCADES} cascades: give fewer of either")

    def _check_burst(self) -> None:
        if self.burst_floor is None:
            if self.burst_mean is not None:
                raise invalid("burst_mean", "goes with burst_floor, which is not given")
            return
        held = self.held_quality
        if held is None:
            raise invalid("burst_mean", "is needed with burst_floor where there is no min_quality")
        if not 0 <= held <= 100:
            raise invalid("burst_mean", f"must be from 0 to 100, not {held:g}")
        if self.min_quality is not None and held > self.min_quality:
            raise invalid("burst_mean", f"must be at most min_quality, {self.min_quality:g}, not {held:g}")
        if not 0 <= self.burst_floor < held:
            raise invalid(
                "burst_floor", f"must be from 0 to less than the mean that holds, {held:g}, not {self.burst_floor:g}"
            )
