"""What tenants have used, by day, in Redis: written by routers, read for `penstock usage`."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from penstock.services.state.connection import as_bytes, state_errors
from penstock.services.state.keys import Keys

KEPT_DAYS = 400


@dataclass(frozen=True, slots=True)
class UsageOf:
    """What usage is counted by."""

    tenant: str
    key_id: str
    tier: str


Usage = dict[UsageOf, dict[str, float]]
"""By measure: requests, prompt_tokens, output_tokens; tier_seconds that requests spent at the tier; cost in the unit of the
prices."""


class UsageStore:
    """All methods raise StateUnavailable without Redis."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys

    async def add(self, usage: Mapping[UsageOf, Mapping[str, float]], now: float) -> None:
        """Add usage to the day of `now`, Unix seconds, in UTC; nothing for an amount that is no number.

        Redis refuses such an amount and adds the others, which the caller would then add once more.
        """
        key = self._keys.usage(day(now))
        with state_errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                for of, measures in usage.items():
                    for measure, amount in measures.items():
                        if not math.isfinite(amount):
                            continue
                        pipe.hincrbyfloat(key, "|".join((of.tenant, of.key_id, of.tier, measure)), amount)
                pipe.pexpire(key, KEPT_DAYS * 86_400_000)
                await pipe.execute()

    async def read(self, days: int, now: float) -> Usage:
        """The usage of the last `days` days, today included."""
        usage: Usage = {}
        for ago in range(days):
            with state_errors():
                entries: Any = await self._redis.hgetall(self._keys.usage(day(now - ago * 86_400)))
            for name, value in entries.items():
                tenant, key_id, tier, measure = as_bytes(name).decode().split("|")
                measures = usage.setdefault(UsageOf(tenant, key_id, tier), {})
                measures[measure] = measures.get(measure, 0.0) + float(value)
        return usage


def day(now: float) -> str:
    """The day of a Unix time, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(now))
