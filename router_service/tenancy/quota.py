"""One limit per minute of one tenant, as this process enforces it."""

import asyncio
import logging
from collections.abc import Callable

from penstock.services.access.tenants import WINDOW_S, UsageWindow
from penstock.services.domain.errors import RateLimited
from penstock.services.state.connection import StateUnavailable
from penstock.services.state.limits import SharedLimits

_log = logging.getLogger(__name__)

CHUNK_SHARE = 200
"""A process takes a 200th of a limit from Redis at once, at least one: so it asks Redis at most a few hundred times a minute,
whatever the rate, and what two routers have taken and not used is within 1 % of the limit."""

MAX_TRUST_S = 0.25
"""How long a refusal by Redis holds for further requests: other routers may give back what they do not use."""


class Quota:
    """What a tenant may use per minute, taken from the limit that all routers share; without Redis, from one of its own.

    kind: `requests` or `tokens`. now_s: the time, in seconds.
    """

    def __init__(self, shared: SharedLimits, tenant: str, kind: str, limit: int, now_s: Callable[[], float]) -> None:
        self._shared, self._tenant, self.kind, self.limit, self._now_s = shared, tenant, kind, limit, now_s
        self._chunk = max(1, limit // CHUNK_SHARE)
        self._granted = 0  # taken from Redis and not used yet; negative: used and not taken yet
        self._full_until_s = 0.0  # known from the last refusal, so that refused requests cost no call to Redis
        self._used_by_all, self._reset_at_s = 0, 0.0
        self._alone = UsageWindow()
        self._asking = asyncio.Lock()

    async def take(self, amount: int) -> int:
        """Use `amount` of the limit, or all of it if that is less: a larger request could never be admitted; return how much.

        Raises:
            RateLimited: Too little is left.
        """
        amount = min(amount, self.limit)
        if self._granted < amount:
            async with self._asking:
                if self._granted < amount:
                    await self._ask(amount - self._granted)
        self._granted -= amount
        self._alone.add(self._now_s(), amount)
        return amount

    def settle(self, change: int) -> None:
        """Count `change` more than was taken, or less if it is negative: the reply's own number of tokens is known now."""
        self._granted -= change
        self._alone.add(self._now_s(), change)

    async def give_back(self) -> None:
        """Tell Redis of what was used beyond what was taken, and return what this process will hardly use."""
        if -self._chunk <= self._granted <= 2 * self._chunk:
            return
        async with self._asking:
            surplus = self._granted - self._chunk
            try:
                if surplus > 0:
                    await self._shared.take(self._tenant, self.kind, self.limit, -surplus, 0, WINDOW_S)
                    self._granted -= surplus
                else:  # Redis counts what is used already, whatever the limit says
                    owed = -self._granted
                    grant = await self._shared.take(self._tenant, self.kind, 2**52, owed, owed, WINDOW_S)
                    self._used_by_all = grant.used
                    self._granted += owed
            except StateUnavailable:
                self._granted = 0

    def state(self) -> tuple[float, float, float]:
        """(limit, remaining, seconds until nothing is used), as far as this process knows."""
        now_s = self._now_s()
        return self.limit, self.limit - self._used_by_all + self._granted, self._reset_at_s - now_s

    async def _ask(self, need: int) -> None:
        now_s = self._now_s()
        if now_s < self._full_until_s:
            raise self._refusal(self._full_until_s - now_s)
        try:
            grant = await self._shared.take(self._tenant, self.kind, self.limit, need, max(need, self._chunk), WINDOW_S)
        except StateUnavailable as error:
            _log.debug("the limits of %s are enforced without the other routers: %s", self._tenant, error)
            free_in_s = self._alone.free_in_s(now_s, need, self.limit)
            if free_in_s > 0:
                raise self._refusal(free_in_s) from None
            self._granted += need
            self._used_by_all, self._reset_at_s = self._alone.total(now_s) + need, now_s + WINDOW_S
            return
        self._used_by_all, self._reset_at_s = grant.used, now_s + grant.reset_s
        if grant.amount < need:
            self._full_until_s = now_s + min(grant.retry_s, MAX_TRUST_S)
            raise self._refusal(grant.retry_s)
        self._granted += grant.amount

    def _refusal(self, retry_s: float) -> RateLimited:
        return RateLimited(
            f"tenant '{self._tenant}' has used its {self.limit} {self.kind} per minute", max(0.001, retry_s)
        )
