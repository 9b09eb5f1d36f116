"""Keeps arrivals and token counts of finished requests in Redis, for `penstock export-trace`. No prompt text is kept."""

from penstock.router_service.domain.events import RouterRequest, is_cascade_workload
from penstock.router_service.telemetry.batched_writes import BatchedWrites
from penstock.services.clock import Clock
from penstock.services.state import ServedRequestStore
from penstock.types.events import Finished
from penstock.types.mesh_status import ServedRequest

BATCH = 1000  # requests per write
HELD_REQUESTS = 10_000  # while Redis is unavailable; older ones are dropped


class RequestRecorder(BatchedWrites[ServedRequest]):
    """Records finished requests of the cascade. Requests to a single tier, resumed and declined ones are left out."""

    def __init__(self, store: ServedRequestStore, clock: Clock) -> None:
        super().__init__("request-recorder", "finished requests", store.append, batch=BATCH, held=HELD_REQUESTS)
        self._clock = clock

    def finished(self, request: RouterRequest, event: Finished) -> None:
        """Record a request that has ended now."""
        if not is_cascade_workload(request, event):
            return
        arrival_s = self._clock.wall() - event.total_s
        prompt_tokens, usage = event.tiers[0].usage.prompt_tokens, event.usage
        # models of other families count other tokens: the share is the same
        cached_tokens = usage.cached_prompt_tokens * prompt_tokens // max(1, usage.prompt_tokens)
        self.add(ServedRequest(arrival_s, prompt_tokens, usage.output_tokens, event.tier, cached_tokens))
