"""Keeps a share of the prompts in Redis, for `penstock measure --live`, where mesh file and tenant consent."""

import random

from penstock.router_service.domain.events import RouterRequest, is_cascade_workload
from penstock.router_service.telemetry.batched_writes import BatchedWrites
from penstock.services.domain.prompt_samples import PromptSample
from penstock.services.state import PromptSampleStore
from penstock.types.events import Finished

BATCH = 50  # prompts per write, under 1 MB
HELD_PROMPTS = 200  # while Redis is unavailable; older ones are dropped


class PromptSampler(BatchedWrites[PromptSample]):
    """Samples prompts of finished requests of the cascade whose callers consent; see PromptSample.of for those left out.

    share: of the requests, from 0 to 1.
    """

    def __init__(self, store: PromptSampleStore, share: float, rng: random.Random) -> None:
        super().__init__("prompt-sampler", "sampled prompts", store.append, batch=BATCH, held=HELD_PROMPTS)
        self._share, self._rng = share, rng

    def finished(self, request: RouterRequest, event: Finished) -> None:
        """Sample a request that has ended now."""
        if not request.may_be_sampled or not is_cascade_workload(request, event):
            return
        if self._rng.random() < self._share and (sample := PromptSample.of(request.prompt, request.sampling)):
            self.add(sample)
