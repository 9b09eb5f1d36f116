"""Plan revisions in Redis: numbered without gaps, all kept, one of them current."""

import dataclasses

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from penstock.services.domain.errors import NotFound, RevisionConflict
from penstock.services.state import codec
from penstock.services.state.connection import as_bytes, state_errors
from penstock.services.state.keys import Keys
from penstock.services.state.leadership import NotLeading
from penstock.types.plans import Plan

KEPT_REVISIONS = 1000


class PlanStore:
    """Reads and publishes plans. All methods raise StateUnavailable without Redis."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys

    async def current(self) -> Plan | None:
        with state_errors():
            revision = await self._redis.get(self._keys.plan_revision)
            if revision is None:
                return None
            data = await self._redis.get(self._keys.plan(int(revision)))
            return codec.plan_from_json(as_bytes(data)) if data is not None else None

    async def get(self, revision: int) -> Plan:
        """The plan of a revision.

        Raises:
            NotFound: There is no such revision.
        """
        with state_errors():
            data = await self._redis.get(self._keys.plan(revision))
        if data is None:
            raise NotFound("plan revision", str(revision))
        return codec.plan_from_json(as_bytes(data))

    async def last(self, limit: int) -> list[Plan]:
        """The last `limit` revisions, newest first."""
        with state_errors():
            newest = int(await self._redis.get(self._keys.plan_revision) or 0)
            revisions = range(newest, max(0, newest - limit), -1)
            values = await self._redis.mget([self._keys.plan(r) for r in revisions]) if revisions else []
        return [codec.plan_from_json(as_bytes(data)) for data in values if data is not None]

    async def publish(
        self, plan: Plan, *, expected: int | None = None, at_least: int = 0, leader: str | None = None
    ) -> Plan:
        """Publish `plan` as the next revision, greater than `at_least`; return it with that revision.

        leader: the planner that has to lead for this.

        Raises:
            RevisionConflict: `expected` is not the current revision.
            NotLeading: `leader` does not lead.
        """

        async def publish_next(pipe: Pipeline) -> Plan:
            if leader is not None:
                leads = as_bytes(await pipe.get(self._keys.plan_leader) or b"").decode(errors="replace")
                if leads != leader:
                    raise NotLeading(f"planner {leads or 'none'} leads, not {leader}")
            current = int(await pipe.get(self._keys.plan_revision) or 0)
            if expected is not None and expected != current:
                raise RevisionConflict(expected, current)
            published = dataclasses.replace(plan, revision=max(current, at_least) + 1)
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.set(self._keys.plan(published.revision), codec.plan_to_json(published))
            pipe.set(self._keys.plan_revision, published.revision)
            if published.revision > KEPT_REVISIONS:
                pipe.delete(self._keys.plan(published.revision - KEPT_REVISIONS))
            return published

        watched = self._keys.plan_revision, self._keys.plan_leader
        with state_errors():
            published: Plan = await self._redis.transaction(publish_next, *watched, value_from_callable=True)
        return published
