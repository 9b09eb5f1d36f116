"""Scores the beginning of an answer while the rest is generated, so that one that would be rejected is cancelled.

Generation never waits for these scores. An answer is rejected only by a score: where no judge is free or can be reached, and
where the scorer does not score unfinished answers, it is generated to its end.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from opentelemetry.metrics import Meter

from penstock.services.acceptance.early_checks import next_check, rejected_early
from penstock.services.counters import LabelledCounter
from penstock.types.rules import EarlyCheck

EARLY_INTERVAL_S = 0.02
"""How long tokens of an answer with early checks may wait at the worker for others."""


class EarlyCheckCounter:
    """Counts early checks by tier and outcome: passed, rejected, unscored."""

    def __init__(self, meter: Meter) -> None:
        labels = ("penstock.tier", "penstock.outcome")
        self._checks = LabelledCounter(meter, "penstock.router.early_checks", labels, unit="{check}")

    def add(self, tier: str, outcome: str) -> None:
        self._checks.add(1, tier, outcome)


class EarlyRejection:
    """The early checks of one answer."""

    def __init__(
        self,
        tier: str,
        checks: Sequence[EarlyCheck],
        score: Callable[[], Awaitable[float | None]],
        counter: EarlyCheckCounter,
    ) -> None:
        """score: the score of the answer as it is now; None without one."""
        self._tier, self._checks, self._score, self._counter = tier, checks, score, counter
        self._tokens = self._done = 0
        self._news = asyncio.Event()

    def has(self, tokens: int) -> None:
        """The answer has so many tokens now."""
        self._tokens = tokens
        if next_check(self._checks, tokens, self._done) is not None:
            self._news.set()

    async def rejecting_score(self) -> float | None:
        """The score that rejects the answer, as soon as there is one; None when all checks have been passed."""
        while self._done < len(self._checks):
            await self._news.wait()
            self._news.clear()
            at = next_check(self._checks, self._tokens, self._done)
            if at is None:
                continue
            self._done = at + 1
            score = await self._score()
            if rejected_early(self._checks[at], score):
                self._counter.add(self._tier, "rejected")
                return score
            self._counter.add(self._tier, "unscored" if score is None else "passed")
            self.has(self._tokens)  # the next check may be due already
        return None
