"""Active health checks of instances whose lease has expired.

They may be dead, or have lost only their link to Redis. As long as they answer with their own instance id, they are the last
resort for new requests; an instance that does not answer is ejected, and later removed.
"""

import asyncio
import logging
from typing import NoReturn

from penstock.router_service.routing.instance_pool import InstancePool
from penstock.services import health
from penstock.services.channels import ChannelPool
from penstock.services.domain.instances import InstanceRecord
from penstock.services.ticks import tick

_log = logging.getLogger(__name__)

INTERVAL_S = 0.5  # less than `ejection_s`: an instance that does not answer stays ejected from one check to the next
TIMEOUT_S = 1.0
FORGET_AFTER_S = 10.0  # without an answer: longer than stalls of a live process, short enough for a restarted one


class LeaseProbe:
    """Checks the instances without a lease in the view of `pool`, over channels that requests use as well."""

    def __init__(self, pool: InstancePool, channels: ChannelPool) -> None:
        self._pool, self._view, self._channels = pool, pool.view, channels
        self._silent_since: dict[str, float] = {}

    async def run(self) -> NoReturn:
        """Check all of them, every `INTERVAL_S`; forever."""
        while True:
            await tick(INTERVAL_S)
            expired = self._view.expired()
            await asyncio.gather(*(self._check(record) for record in expired))
            ids = {record.instance_id for record in expired}
            self._silent_since = {i: at for i, at in self._silent_since.items() if i in ids}

    async def _check(self, record: InstanceRecord) -> None:
        instance_id = record.instance_id
        serving = await health.is_serving(self._channels.get(record.address, record.role), instance_id, TIMEOUT_S)
        if serving:
            self._silent_since.pop(instance_id, None)
            return
        now = asyncio.get_running_loop().time()
        silent_since = self._silent_since.setdefault(instance_id, now)
        if serving is None and now - silent_since < FORGET_AFTER_S:
            self._pool.eject(instance_id)
        elif record in self._view.expired():  # its record may have arrived meanwhile
            _log.info("%s has no lease and %s: removed", instance_id, _reason(serving))
            self._view.forget(instance_id)


def _reason(serving: bool | None) -> str:
    return "does not answer" if serving is None else "drains, or another process has its address"
