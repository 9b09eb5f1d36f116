"""Keeps arrivals and token counts of finished requests in Redis, for `penstock export-trace`. No prompt text is kept."""

from contextlib import AbstractAsyncContextManager
from types import TracebackType

from router_service.domain.events import Finished, RouterRequest, is_cascade_workload
from router_service.telemetry.batched_writes import BatchedWrites
from services.clock import Clock
from services.domain.workload import ServedRequest
from services.state import ServedRequestStore

BATCH = 1000  # requests per write
HELD_REQUESTS = 10_000  # while Redis is unavailable; older ones are dropped


class RequestRecorder(AbstractAsyncContextManager["RequestRecorder"]):
    """Records finished requests of the cascade. Requests to a single tier, resumed and declined ones are left out."""

    def __init__(self, store: ServedRequestStore, clock: Clock) -> None:
        self._clock = clock
        self._writes: BatchedWrites[ServedRequest] = BatchedWrites(
            "request-recorder", "finished requests", store.append, batch=BATCH, held=HELD_REQUESTS
        )

    async def __aenter__(self) -> "RequestRecorder":
        await self._writes.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._writes.__aexit__(kind, error, trace)

    def finished(self, request: RouterRequest, event: Finished) -> None:
        """Record a request that has ended now."""
        if not is_cascade_workload(request, event):
            return
        arrival_s = self._clock.wall() - event.total_s
        prompt_tokens = event.tiers[0].usage.prompt_tokens
        self._writes.add(ServedRequest(arrival_s, prompt_tokens, event.usage.output_tokens, event.tier))
