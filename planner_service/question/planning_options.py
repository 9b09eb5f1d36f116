"""The options of a plan: what they mean together, and what follows from them. No I/O."""

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Self

from penstock.planner_service.question.exclusions import check_together, names_of
from penstock.planner_service.routing.grid import MOST_TIERS
from penstock.planner_service.simulator.felt import latency_words, least_requests
from penstock.services.acceptance.pipeline import asked
from penstock.services.domain.errors import check, invalid
from penstock.types.planning import Dispatch, Goal, Objective, PlanOptions
from penstock.types.ranges import range_problems
from penstock.types.rules import RuleOptions

__all__ = ["Goal", "Options"]

LEAST_REQUESTS = 20  # to plan on: with fewer, the 95th percentile is the slowest request
MOST_CASCADES = 1000  # that are chosen from


@dataclass(frozen=True, slots=True)
class Options(PlanOptions):
    """The options of a question, and what follows from them."""

    @classmethod
    def of(cls, question: PlanOptions, tiers: int, known: Collection[str] = ()) -> Self:
        """Of a question about a cascade of so many tiers. known: of where it is to run, see `exclusions`.

        Raises:
            InvalidRequest: An option is out of range or does not go with the others; names it.
        """
        options = cls(**{field.name: getattr(question, field.name) for field in fields(PlanOptions)})
        options.check(tiers, known)
        return options

    @property
    def has_rules(self) -> bool:
        """Whether rules of routing are chosen with the plan."""
        return bool(asked(self.rules))

    @property
    def most_utilisation(self) -> float | None:
        """Of what a tier sustains, the share that its requests may take; None where a plan may be overloaded."""
        return None if self.allow_overload else self.max_utilisation

    @property
    def without_rules(self) -> Self:
        """The same for a plan without rules."""
        return replace(self, rules=RuleOptions())

    def chooses_form(self, tiers: int, *, predicted: bool) -> bool:
        """Whether a plan for a cascade of so many tiers looks for the best of its parts, too: by what users feel, for the
        least cost and where prompts can be routed; and where there are too many tiers to search them together. Rules are then
        added to what is best without them."""
        by_users = (self.aim is Goal.COST or predicted) and self.objective is not Objective.LARGEST_TIER
        return tiers > MOST_TIERS or (tiers > 1 and by_users)

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
        if self.min_quality is None:
            return Goal.QUALITY
        # the slowest tier's is the paper's question; a plan that may be overloaded is for a burst
        papers = self.objective is Objective.LARGEST_TIER or self.allow_overload
        return Goal.LATENCY if papers and self.max_latency_s is None else Goal.COST

    def check(self, tiers: int, known: Collection[str] = ()) -> None:
        """InvalidRequest naming the option that does not go with the others, or that is out of bounds. known: of what the
        plan is for, see `exclusions`."""
        check(range_problems(self))
        check_together({*names_of(self, tiers), *known})
        if self.dispatch is Dispatch.PENDING_WORK:
            raise invalid("dispatch", "plans are made with capacity or round-robin; pending-work is for simulations")
        self._check_candidates(tiers)

    def _check_candidates(self, tiers: int) -> None:
        if self.max_tiers is None:
            return
        if not 1 <= self.max_tiers <= tiers:
            raise invalid("max_tiers", f"must be from 1 to the number of candidates, {tiers}, not {self.max_tiers}")
        if self.max_tiers > MOST_TIERS:
            raise invalid("max_tiers", f"must be at most {MOST_TIERS}, the most tiers in a plan, not {self.max_tiers}")
        least = 1 if self.min_tiers is None else self.min_tiers
        if not 1 <= least <= self.max_tiers:
            raise invalid("min_tiers", f"must be from 1 to max_tiers, {self.max_tiers}, not {least}")
        cascades = itertools.accumulate(math.comb(tiers, count) for count in range(least, self.max_tiers + 1))
        if any(number > MOST_CASCADES for number in cascades):  # not counted further
            sizes = f"{least} to {self.max_tiers} of {tiers} candidates"
            raise invalid("max_tiers", f"{sizes} are more than {MOST_CASCADES} cascades: give fewer of either")
