"""Which of several planners leads: a lease in Redis, which another takes when it has ended."""

import logging

from redis.asyncio import Redis

from penstock.services.clock import Clock
from penstock.services.domain.errors import Unavailable
from penstock.services.state.connection import as_bytes, state_errors
from penstock.services.state.keys import Keys

LEASE_S = 4.0
"""After this long without renewal another planner leads."""

_HOLD = """
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then return leader end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""

_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"

_log = logging.getLogger(__name__)


class NotLeading(Unavailable):
    """Another planner leads, or none."""

    reason = "NOT_LEADING"


class Leadership:
    """What one planner knows of it. name: its instance id, which no other planner has."""

    def __init__(self, redis: Redis, keys: Keys, name: str, clock: Clock, lease_s: float = LEASE_S) -> None:
        self.name, self._key, self._clock, self._lease_s = name, keys.plan_leader, clock, lease_s
        self._hold, self._release = redis.register_script(_HOLD), redis.register_script(_RELEASE)
        self._until_s, self._leader = 0.0, ""

    @property
    def leads(self) -> bool:
        """Whether this planner leads. A lease that is not renewed ends here before it ends in Redis."""
        return self._clock.now() < self._until_s

    async def hold(self) -> bool:
        """Take the lease or renew it, unless another planner has it; return whether this one leads.

        Raises:
            StateUnavailable: Redis cannot be reached. The lease lasts until it ends.
        """
        asked_s = self._clock.now()
        with state_errors():
            answer = await self._hold(keys=[self._key], args=[self.name, round(self._lease_s * 1000)])
        leader = as_bytes(answer).decode(errors="replace")
        self._until_s = asked_s + self._lease_s if leader == self.name else 0.0
        if leader != self._leader:
            _log.info("planner %s leads%s", leader, "" if leader == self.name else ", this one waits")
            self._leader = leader
        return self.leads

    async def release(self) -> None:
        """Let another planner lead at once.

        Raises:
            StateUnavailable: Redis cannot be reached: the lease has to end by itself.
        """
        self._until_s = 0.0
        with state_errors():
            await self._release(keys=[self._key], args=[self.name])
