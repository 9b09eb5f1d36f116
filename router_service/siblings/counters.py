"""The counters of one process of a router, and their sum over several processes. No I/O."""

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from router_service.domain.burst_counts import BurstCounts
from router_service.domain.slo_counts import SloCounts


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """Counters since the process started. ttft_s: times to first token of its last requests, in no particular order.

    answered, escalated: requests by tier whose answer was accepted, and that were escalated. accepted_draft_tokens,
        rejected_draft_tokens: by tier, as in TokenUsage. listening: whether the process
        accepts new connections. burst: None where the plan has no burst ladder.
    """

    active: int = 0
    waiting: int = 0
    finished: int = 0
    failed: int = 0
    rejected: int = 0
    failovers: int = 0
    migrations: int = 0
    advice_unmet: int = 0
    requests_per_s: float = 0.0
    ttft_s: tuple[float, ...] = ()
    answered: Mapping[str, int] = field(default_factory=dict)
    escalated: Mapping[str, int] = field(default_factory=dict)
    accepted_draft_tokens: Mapping[str, int] = field(default_factory=dict)
    rejected_draft_tokens: Mapping[str, int] = field(default_factory=dict)
    listening: bool = False
    slo: SloCounts = field(default_factory=SloCounts)
    burst: BurstCounts | None = None

    def ttft_percentile(self, share: float) -> float:
        """Percentile of the times to first token, in seconds; 0 without requests. share: from 0 to 1."""
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def total(parts: Iterable[ProcessCounters]) -> ProcessCounters:
    """The sum over several processes. Percentiles are those of all their last requests."""
    counted = [*parts]
    bursts = [part.burst for part in counted if part.burst is not None]
    return ProcessCounters(
        listening=any(part.listening for part in counted),
        active=sum(part.active for part in counted),
        waiting=sum(part.waiting for part in counted),
        finished=sum(part.finished for part in counted),
        failed=sum(part.failed for part in counted),
        rejected=sum(part.rejected for part in counted),
        failovers=sum(part.failovers for part in counted),
        migrations=sum(part.migrations for part in counted),
        advice_unmet=sum(part.advice_unmet for part in counted),
        requests_per_s=sum(part.requests_per_s for part in counted),
        ttft_s=tuple(value for part in counted for value in part.ttft_s),
        answered=_sum(part.answered for part in counted),
        accepted_draft_tokens=_sum(part.accepted_draft_tokens for part in counted),
        rejected_draft_tokens=_sum(part.rejected_draft_tokens for part in counted),
        slo=sum((part.slo for part in counted), SloCounts()),
        escalated=_sum(part.escalated for part in counted),
        burst=functools.reduce(operator.add, bursts) if bursts else None,
    )


def _sum(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    return sum((Counter(part) for part in parts), Counter[str]())
