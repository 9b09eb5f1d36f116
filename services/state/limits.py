"""Limits of tenants that all routers share: counters in Redis, changed by scripts, so that no two routers count the same.

Amounts are counted by the second; what was used in the last 60 s, and in the rest of the second before, counts against the
limit. So no 60 s have more than the limit.
"""

from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from penstock.services.state.connection import state_errors
from penstock.services.state.keys import Keys

HOLD_S = 10
"""Requests of a router that has not been heard of for this long no longer count against a tenant's concurrency."""

_TAKE = """
local limit, need, want, window = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now, second = tonumber(time[1]) + tonumber(time[2]) / 1e6, tonumber(time[1])
local all, used, seconds = redis.call('HGETALL', KEYS[1]), 0, {}
for i = 1, #all, 2 do
  local at = tonumber(all[i])
  if at < second - window then
    redis.call('HDEL', KEYS[1], all[i])
  else
    used = used + tonumber(all[i + 1])
    seconds[#seconds + 1] = {at, tonumber(all[i + 1])}
  end
end
local free, grant, retry = limit - used, 0, 0
if need <= 0 then
  grant = need
elseif free >= need then
  grant = math.min(want, free)
else
  table.sort(seconds, function(a, b) return a[1] < b[1] end)
  retry = window
  local short = need - free
  for _, entry in ipairs(seconds) do
    short = short - entry[2]
    if short <= 0 then
      retry = entry[1] + window + 1 - now
      break
    end
  end
end
if grant ~= 0 then
  redis.call('HINCRBY', KEYS[1], tostring(second), grant)
  redis.call('PEXPIRE', KEYS[1], (window + 2) * 1000)
end
local newest = grant ~= 0 and second or 0
for _, entry in ipairs(seconds) do newest = math.max(newest, entry[1]) end
local reset = newest > 0 and newest + window + 1 - now or 0
return {grant, math.floor(used + grant), tostring(retry), tostring(reset)}
"""

_HOLD = """
local limit, count, hold_ms = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local all, others = redis.call('HGETALL', KEYS[1]), 0
for i = 1, #all, 2 do
  local held, until_ms = string.match(all[i + 1], '^(%-?%d+):(%d+)$')
  if all[i] ~= ARGV[1] then
    if tonumber(until_ms) < now_ms then
      redis.call('HDEL', KEYS[1], all[i])
    else
      others = others + tonumber(held)
    end
  end
end
local granted = (limit < 0 or others + count <= limit) and 1 or 0
if granted == 1 then
  if count > 0 then
    redis.call('HSET', KEYS[1], ARGV[1], string.format('%d:%d', count, now_ms + hold_ms))
    redis.call('PEXPIRE', KEYS[1], hold_ms * 2)
  else
    redis.call('HDEL', KEYS[1], ARGV[1])
  end
end
return {granted, others}
"""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a router may use. amount: 0 if there is too little left. used: by all routers, in the last minute, this included.

    retry_s: until enough is free, if there is too little now. reset_s: until nothing is used, if nothing more is.
    """

    amount: int
    used: int
    retry_s: float
    reset_s: float


class SharedLimits:
    """All methods raise StateUnavailable without Redis."""

    def __init__(self, redis: Redis, keys: Keys, router_id: str) -> None:
        self._keys, self._router_id = keys, router_id
        self._take_script = redis.register_script(_TAKE)
        self._hold_script = redis.register_script(_HOLD)

    async def take(self, tenant: str, kind: str, limit: int, need: int, want: int, window_s: int) -> Grant:
        """Take `want` of a limit per window, at least `need`, or nothing. A `need` of 0 or less is given back at once."""
        with state_errors():
            result: Any = await self._take_script(
                keys=[self._keys.limit(tenant, kind)], args=[limit, need, want, window_s]
            )
        return Grant(int(result[0]), int(result[1]), float(result[2]), float(result[3]))

    async def hold(self, tenant: str, count: int, limit: int | None) -> bool:
        """Say how many requests of a tenant this router has now; False, and nothing changes, if all have more than the limit.

        limit: None to say it in any case.
        """
        with state_errors():
            result: Any = await self._hold_script(
                keys=[self._keys.limit(tenant, "concurrency")],
                args=[self._router_id, -1 if limit is None else limit, count, HOLD_S * 1000],
            )
        return bool(result[0])
