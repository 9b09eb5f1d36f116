"""What is kept in Redis of finished requests of the cascade, where the mesh file says so.

Arrivals and token counts for `penstock export-trace`, without any prompt text; and a share of the prompts for
`penstock measure --live`, where mesh file and tenant consent.
"""

import random

from penstock.router_service.domain.events import RouterRequest, is_cascade_workload
from penstock.router_service.telemetry.batched_writes import BatchedWrites
from penstock.services.clock import Clock
from penstock.services.domain.prompt_samples import PromptSample
from penstock.services.state.prompt_samples import PromptSampleStore
from penstock.services.state.served_requests import ServedRequestStore
from penstock.types.events import Finished
from penstock.types.mesh_status import ServedRequest

REQUEST_BATCH = 1000  # per write
HELD_REQUESTS = 10_000  # while Redis is unavailable; older ones are dropped
PROMPT_BATCH = 50  # per write, under 1 MB
HELD_PROMPTS = 200  # while Redis is unavailable; older ones are dropped


class RequestRecorder(BatchedWrites[ServedRequest]):
    """Records finished requests of the cascade. Requests to a single tier, resumed and declined ones are left out."""

    def __init__(self, store: ServedRequestStore, clock: Clock) -> None:
        super().__init__("request-recorder", "finished requests", store.append, batch=REQUEST_BATCH, held=HELD_REQUESTS)
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


class PromptSampler(BatchedWrites[PromptSample]):
    """Samples prompts of finished requests of the cascade whose callers consent; see PromptSample.of for those left out.

    share: of the requests, from 0 to 1.
    """

    def __init__(self, store: PromptSampleStore, share: float, rng: random.Random) -> None:
        super().__init__("prompt-sampler", "sampled prompts", store.append, batch=PROMPT_BATCH, held=HELD_PROMPTS)
        self._share, self._rng = share, rng

    def finished(self, request: RouterRequest, event: Finished) -> None:
        """Sample a request that has ended now."""
        if not request.may_be_sampled or not is_cascade_workload(request, event):
            return
        if self._rng.random() < self._share and (sample := PromptSample.of(request.prompt, request.sampling)):
            self.add(sample)
