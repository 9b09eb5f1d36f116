"""The scheduler that serves, told how much of each prompt is cached."""

from collections.abc import Sequence as Seq

from penstock.worker_service.scheduling.batching import BatchLimits, BatchScheduler
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.scheduling.sequence import Sequence
from penstock.worker_service.scheduling.steps import BatchPolicy


class KnowsPrefixes(BatchScheduler):
    """Requests, numbered by their ids, have the KV of their first tokens when they start, unless they were preempted.

    cached: tokens by request. All KV of a request is its own, as the pool shares none.
    """

    def __init__(
        self, limits: BatchLimits, pool: BlockPool, cached: Seq[int], policy: BatchPolicy | None = None
    ) -> None:
        super().__init__(limits, pool, policy)
        self._cached = cached

    def start(self, sequence: Sequence) -> bool:
        started = super().start(sequence)
        if started and sequence.preemptions == 0:
            sequence.computed = self._cached[int(sequence.request_id)]
        return started
