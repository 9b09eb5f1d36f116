"""Active health checks of workers and judges, at the addresses that they advertise.

New ones: their leases say that they reach Redis, not that anyone reaches them: an address may be wrong, closed, or another
process's. Until an instance has answered with its own id it is not ready, and after a check without an answer it gets no
requests.

Those whose lease has expired may be dead, or have lost only their link to Redis. As long as they answer with their own
instance id, they are the last resort for new requests; an instance that does not answer is ejected, and later removed.
"""

import asyncio
import logging
from typing import NoReturn

from penstock.router_service.routing.instance_pool import InstancePool
from penstock.services import health
from penstock.services.channels import ChannelPool
from penstock.services.domain.instances import InstanceRecord, Role
from penstock.services.ticks import tick

_log = logging.getLogger(__name__)

CALLED = (Role.WORKER, Role.JUDGE)
"""Roles that routers call."""
INTERVAL_S = 0.5  # less than `ejection_s`: an instance that does not answer stays ejected from one check to the next
NEW_TIMEOUT_S = 5.0  # long enough for a process that has just started on a busy machine
TIMEOUT_S = 1.0  # without a lease
FORGET_AFTER_S = 10.0  # without an answer: longer than stalls of a live process, short enough for a restarted one


class HealthProbes:
    """Checks instances in the view of `pool`, over channels that requests use as well."""

    def __init__(self, pool: InstancePool, channels: ChannelPool) -> None:
        self._pool, self._view, self._channels = pool, pool.view, channels
        self._checks: dict[tuple[str, float], asyncio.Task[None]] = {}
        """Of new instances, by instance id and epoch."""
        self._silent_since: dict[str, float] = {}
        """By id of an instance without a lease."""

    async def check_new(self) -> NoReturn:
        """Check the instances with a lease until they have answered: all at once, and each one that is new; forever."""
        async with asyncio.TaskGroup() as group:
            while True:
                for record in (record for role in CALLED for record in self._view.instances(role)):
                    key = record.instance_id, record.epoch
                    if key not in self._checks and self._view.is_unreached(record):
                        self._checks[key] = group.create_task(self._until_reached(record))
                await self._pool.change(INTERVAL_S)

    async def _until_reached(self, record: InstanceRecord) -> None:
        instance_id, reported = record.instance_id, False
        try:
            while self._view.is_unreached(record):
                channel = self._channels.get(record.address, record.role)
                serving = await health.is_serving(channel, instance_id, NEW_TIMEOUT_S, wait_for_ready=True)
                if serving:
                    self._view.reach(record)
                    self._pool.readmit(instance_id)
                    return
                self._pool.eject(instance_id)
                if not reported:
                    reason = "no process answers" if serving is None else "it drains, or another process answers"
                    _log.warning("%s is not used: at %s, where it says it is, %s", instance_id, record.address, reason)
                    reported = True
                await tick(INTERVAL_S)
        finally:
            self._checks.pop((instance_id, record.epoch), None)

    async def check_expired(self) -> NoReturn:
        """Check all instances without a lease, every `INTERVAL_S`; forever."""
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
            reason = "does not answer" if serving is None else "drains, or another process has its address"
            _log.info("%s has no lease and %s: removed", instance_id, reason)
            self._view.forget(instance_id)
