"""What one process of a router counts, and the sum over several. No I/O."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """Counts since the process started. ttft_s: times to first token of its last requests, in no order.

    answered, escalated: requests by tier: whose answer stood, and which went on to the next one. listening: the process takes
        new connections.
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
    listening: bool = False

    def ttft_percentile(self, share: float) -> float:
        """Time to first token that this share of the last requests did not exceed, in seconds; 0 without any."""
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def total(parts: Iterable[ProcessCounters]) -> ProcessCounters:
    """What several processes count together. Percentiles are those of all their last requests."""
    counted = [*parts]
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
        answered=sum((Counter(part.answered) for part in counted), Counter[str]()),
        escalated=sum((Counter(part.escalated) for part in counted), Counter[str]()),
    )
