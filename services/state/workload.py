"""Windows of sampled requests in Redis: written by routers, read by the planner, capped."""

import json
from dataclasses import asdict

from redis.asyncio import Redis

from penstock.services.domain.workload import Window
from penstock.services.field_problems import from_json
from penstock.services.state.connection import as_bytes, state_errors
from penstock.services.state.keys import Keys

KEPT_WINDOWS = 600  # two days of five-minute windows of one router


class WorkloadStore:
    """Stores windows. All methods raise StateUnavailable without Redis."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys

    async def append(self, window: Window) -> None:
        data = json.dumps(asdict(window), separators=(",", ":"))
        with state_errors():
            await self._redis.xadd(self._keys.workload, {"window": data}, maxlen=KEPT_WINDOWS, approximate=True)

    async def after(self, last_id: str) -> tuple[str, list[Window]]:
        """(id of the last entry, windows) of the entries after `last_id`; "0": of all entries."""
        with state_errors():
            rows = await self._redis.xrange(self._keys.workload, min=f"({last_id}" if last_id != "0" else "-")
        windows = []
        for entry, fields in rows or ():
            last_id = as_bytes(entry or b"").decode()
            if fields:
                windows.append(from_json(Window, as_bytes(fields[b"window"])))
        return last_id, windows
