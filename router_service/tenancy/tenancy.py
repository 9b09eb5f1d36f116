"""Admits requests by tenant, and counts what they use."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from opentelemetry.metrics import Meter

from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.tenancy.key_follower import KeyFollower
from penstock.router_service.tenancy.quota import Quota
from penstock.services.access.api_keys import bearer
from penstock.services.access.tenants import Caller, rate_limit_headers, reserved_tokens
from penstock.services.background import BackgroundWork, Works
from penstock.services.counters import LabelledCounter
from penstock.services.domain.errors import PenstockError, PermissionDenied, RateLimited, Unauthenticated
from penstock.services.mesh_schema.access import MeshTenant
from penstock.services.state.connection import StateUnavailable
from penstock.services.state.limits import HOLD_S, SharedLimits
from penstock.services.state.usage import UsageOf, UsageStore
from penstock.types.events import Finished

SYNC_S = 1.0
"""Interval at which a process tells Redis what it has used, and what it holds."""

Prices = Mapping[str, tuple[float, float]]
"""Price of a million prompt tokens and of a million output tokens, by tier."""

caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Who makes the call of this context; None where no key is needed."""


@dataclass(slots=True)
class Admission:
    """A call that was admitted, and what it has used.

    headers: OpenAI's rate-limit headers for its response. tokens: used so far. known: whether that is all of it; otherwise,
    what was reserved counts.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    tokens: int = 0
    known: bool = False

    def used(self, tokens: int) -> None:
        """The call has used so many tokens in all."""
        self.tokens, self.known = tokens, True


@dataclass(slots=True)
class TenantAdmission(Admission):
    """Requests that were admitted together.

    requests: as they may be served: with the tenant's limit of tokens. count: called with the last event of each.
    """

    requests: tuple[RouterRequest, ...] = ()
    count: Callable[[Finished], None] = lambda _: None
    ended: int = 0

    def finished(self, event: Finished) -> None:
        """To be called with the last event of each request, unless `counted` runs it."""
        self.tokens += event.usage.prompt_tokens + event.usage.output_tokens
        self.ended += 1
        self.known |= self.ended == len(self.requests)  # otherwise the client has left
        self.count(event)

    def failed(self) -> None:
        """To be called if the mesh fails the requests and the error does not leave the context."""
        self.known = True

    async def counted(self, run: Awaitable[Finished]) -> None:
        """Run one of the requests, and count what it has used."""
        self.finished(await run)


class _TenantState:
    """The limits of one tenant, and its requests at this process."""

    def __init__(self, tenant: MeshTenant, shared: SharedLimits, now_s: Callable[[], float]) -> None:
        self.tenant, self._shared = tenant, shared
        limits = (("requests", tenant.requests_per_minute), ("tokens", tenant.tokens_per_minute))
        self.quotas = {kind: Quota(shared, tenant.name, kind, limit, now_s) for kind, limit in limits if limit}
        self.active, self._told = 0, 0

    async def begin(self, count: int) -> None:
        """Begin requests.

        Raises:
            RateLimited: The tenant has too many.
        """
        limit = self.tenant.concurrency
        self.active += count
        if limit is None:
            return
        try:
            granted = await self._shared.hold(self.tenant.name, self.active, limit)
            self._told = self.active if granted else self._told
        except StateUnavailable:
            granted = self.active <= limit
        except BaseException:
            self.active -= count
            raise
        if not granted:
            self.active -= count
            raise RateLimited(f"tenant '{self.tenant.name}' has {limit} requests running already", 1.0)

    async def take(self, requests: int, tokens: int) -> int:
        """Take requests and tokens from their limits; return the tokens taken."""
        by_requests, by_tokens = self.quotas.get("requests"), self.quotas.get("tokens")
        if by_requests is not None:
            requests = await by_requests.take(requests)
        try:
            return await by_tokens.take(tokens) if by_tokens is not None else 0
        except RateLimited:
            if by_requests is not None:
                by_requests.settle(-requests)
            raise

    async def sync(self, *, renew: bool) -> None:
        """Tell Redis what has changed. renew: also how many requests are running, before Redis forgets it."""
        for quota in self.quotas.values():
            await quota.give_back()
        if self.tenant.concurrency is not None and (self.active != self._told or (renew and self.active)):
            count = self.active
            if await self._shared.hold(self.tenant.name, count, None):
                self._told = count


class Tenancy(BackgroundWork):
    """Recognises callers by their keys, enforces the limits of tenants, and counts what they use.

    Without keys, every caller is served, and nothing is counted.
    """

    def __init__(
        self,
        tenants: Sequence[MeshTenant],
        keys: KeyFollower | None,
        shared: SharedLimits,
        store: UsageStore,
        meter: Meter,
        prices: Prices,
    ) -> None:
        self._keys, self._store, self._prices = keys, store, prices
        self._states = {tenant.name: _TenantState(tenant, shared, time.monotonic) for tenant in tenants}
        self._pending: dict[UsageOf, dict[str, float]] = {}
        self._released = asyncio.Event()
        labels = ("penstock.tenant", "penstock.key_id", "penstock.tier")
        self._tokens = LabelledCounter(
            meter, "penstock.usage.tokens", (*labels, "penstock.kind"), unit="{token}", description="Tokens by tenant."
        )
        compute = "Seconds of GPUs, or of CPU engines, by tenant."
        self._compute = LabelledCounter(meter, "penstock.usage.compute", labels, unit="s", description=compute)
        self._requests = LabelledCounter(
            meter, "penstock.usage.requests", labels, unit="{request}", description="Replies of tiers, by tenant."
        )
        self._limited = meter.create_counter(
            "penstock.usage.limited", unit="{request}", description="Requests refused by a tenant's limit."
        )

    @property
    def needs_keys(self) -> bool:
        return self._keys is not None

    def work(self) -> Works:
        return {"tenant-limits": self._sync} if self._keys is not None else {}

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        if self._keys is not None:
            await self._sync_once(renew=False)

    def authenticate(self, headers: Mapping[str, str]) -> None:
        """Recognise the caller by its headers, for the calls of this context.

        Raises:
            Unauthenticated: There is no key, it is not valid, or its tenant does not exist.
        """
        if self._keys is None:
            return
        key = self._keys.ring.recognise(bearer(headers), time.time())
        state = self._states.get(key.tenant)
        if state is None:
            raise Unauthenticated(f"the mesh file has no tenant '{key.tenant}', to which this API key belongs")
        caller.set(Caller(state.tenant, key.key_id))

    def allows_model(self, model: str) -> bool:
        """Whether the caller of this context may use a model."""
        current = caller.get()
        return current is None or current.tenant.allows_model(model)

    @asynccontextmanager
    async def admitted(self, requests: Sequence[RouterRequest]) -> AsyncIterator[TenantAdmission]:
        """Admit requests of one call as long as the context lasts: all of them, or none.

        Entering it raises:
            PermissionDenied: The tenant may not use the model.
            InvalidRequest: A field is above the tenant's limit.
            RateLimited: The tenant has used up a limit.
        """
        current = caller.get()
        if current is None:
            sampled = self._keys is None
            yield TenantAdmission(requests=tuple([replace(each, may_be_sampled=sampled) for each in requests]))
            return
        state = self._states[current.tenant.name]
        allowed = tuple([_allowed(current.tenant, request, len(requests)) for request in requests])
        reserved = sum(reserved_tokens(request.prompt, request.sampling) for request in allowed)
        admission = TenantAdmission(requests=allowed, count=partial(self._count, current))
        async with self._within_limits(state, len(allowed), reserved, admission):
            yield admission

    @asynccontextmanager
    async def admitted_text(self, model: str, tokens: int) -> AsyncIterator[Admission]:
        """Admit a call about a text of about `tokens` tokens, as long as the context lasts: as one request with its tokens.

        Raises:
            PermissionDenied: The tenant may not use the model.
            RateLimited: The tenant has used up a limit.
        """
        current, admission = caller.get(), Admission()
        if current is None:
            yield admission
            return
        if not current.tenant.allows_model(model):
            raise PermissionDenied(f"model: tenant '{current.tenant.name}' may not use it")
        async with self._within_limits(self._states[current.tenant.name], 1, tokens, admission):
            yield admission

    @asynccontextmanager
    async def _within_limits(
        self, state: _TenantState, requests: int, tokens: int, admission: Admission
    ) -> AsyncIterator[None]:
        """Hold places for requests of a tenant and reserve their tokens; at the end, what was used counts.

        Raises:
            RateLimited: The tenant has used up a limit.
        """
        try:
            await state.begin(requests)
            try:
                taken = await state.take(requests, tokens)
            except BaseException:
                self._end(state, requests)
                raise
        except RateLimited as error:
            self._limited.add(1, {"penstock.tenant": state.tenant.name})
            raise RateLimited(str(error).partition(";")[0], error.retry_after_s, _headers(state)) from None
        admission.headers = _headers(state)
        try:
            yield
        except PenstockError:
            admission.known = True  # what the mesh did not serve costs nothing
            raise
        finally:
            if admission.known and (quota := state.quotas.get("tokens")) is not None:
                quota.settle(admission.tokens - taken)
            self._end(state, requests)

    def _end(self, state: _TenantState, count: int) -> None:
        state.active -= count
        if state.tenant.concurrency is not None:
            self._released.set()

    def _count(self, current: Caller, event: Finished) -> None:
        for summary in event.tiers:
            usage, labels = summary.usage, (current.tenant.name, current.key_id, summary.tier)
            prompt_price, output_price = self._prices.get(summary.tier, (0.0, 0.0))
            self._requests.add(1, *labels)
            self._tokens.add(usage.prompt_tokens, *labels, "prompt")
            self._tokens.add(usage.output_tokens, *labels, "output")
            self._compute.add(usage.compute_s, *labels)
            amounts = {
                "requests": 1.0,
                "prompt_tokens": float(usage.prompt_tokens),
                "output_tokens": float(usage.output_tokens),
                "tier_seconds": summary.time_s,
                "compute_seconds": usage.compute_s,
                "cost": (usage.prompt_tokens * prompt_price + usage.output_tokens * output_price) / 1e6,
            }
            self._add_pending(UsageOf(*labels), amounts)

    def _add_pending(self, of: UsageOf, amounts: Mapping[str, float]) -> None:
        pending = self._pending.setdefault(of, {})
        for measure, amount in amounts.items():
            pending[measure] = pending.get(measure, 0.0) + amount

    async def _sync(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        while True:
            self._released.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SYNC_S):
                    await self._released.wait()
            renew = loop.time() - renewed_s >= HOLD_S / 3
            renewed_s = loop.time() if renew else renewed_s
            await self._sync_once(renew=renew)

    async def _sync_once(self, *, renew: bool) -> None:
        pending: dict[UsageOf, dict[str, float]] = {}
        try:
            for state in self._states.values():
                await state.sync(renew=renew)
            if self._pending:
                pending, self._pending = self._pending, {}
                await self._store.add(pending, time.time())
        except StateUnavailable:  # told again when Redis is back
            for of, amounts in pending.items():
                self._add_pending(of, amounts)


def _allowed(tenant: MeshTenant, request: RouterRequest, count: int) -> RouterRequest:
    """A request as it may be served, one of `count` of a call. Raises as `Tenancy.admitted` does."""
    slo_class = None if request.promise is None else request.promise.class_name
    tenant.check(request.model, request.sampling, count, request.priority, slo_class=slo_class)
    sampling, salt = request.sampling, tenant.cache_salt(request.cache_salt)
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=tenant.max_tokens)
    return replace(request, sampling=sampling, may_be_sampled=tenant.sample_prompts, cache_salt=salt)


def _headers(state: _TenantState) -> dict[str, str]:
    return rate_limit_headers({kind: quota.state() for kind, quota in state.quotas.items()})
