"""Active health checks of new workers and judges, at the addresses that they advertise.

Their leases say that they reach Redis, not that anyone reaches them: an address may be wrong, closed, or another process's.
Until an instance has answered with its own id it is not ready, and after a check without an answer it gets no requests.
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
TIMEOUT_S = 5.0  # long enough for a process that has just started on a busy machine


class AddressProbe:
    """Checks the instances with a lease in the view of `pool` until they have answered, over channels of requests."""

    def __init__(self, pool: InstancePool, channels: ChannelPool) -> None:
        self._pool, self._view, self._channels = pool, pool.view, channels
        self._checks: dict[tuple[str, float], asyncio.Task[None]] = {}
        """By instance id and epoch."""

    async def run(self) -> NoReturn:
        """Check all of them at once, and each one that is new; forever."""
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
                serving = await health.is_serving(channel, instance_id, TIMEOUT_S, wait_for_ready=True)
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
