"""Statistics of served requests that routers report to the planner, without prompt text. No I/O."""

from dataclasses import dataclass

PARTS = 10  # of a window; arrivals are counted per part to measure burstiness


@dataclass(frozen=True, slots=True)
class TierVisit:
    """The work of one tier on a request. score: None if the answer was not scored, as mostly at the last tier."""

    tier: str
    output_tokens: int
    score: float | None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request of the cascade. arrival_s: Unix time. weight: number of requests that this sample represents.

    predicted: (tier, score that was predicted for its answer), where tiers may be passed over by it; empty elsewhere.
    """

    arrival_s: float
    input_tokens: int
    visits: tuple[TierVisit, ...]
    weight: float = 1.0
    predicted: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """A window of `seconds` from `start_s` (Unix time): arrivals in each of its PARTS, and a sample of finished requests."""

    start_s: float
    seconds: float
    arrivals: tuple[int, ...]
    records: tuple[RequestRecord, ...]

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


def joined(windows: list[Window]) -> Window:
    """Merge the reports of several routers about the same window."""
    first = windows[0]
    arrivals = tuple(sum(parts) for parts in zip(*(w.arrivals for w in windows), strict=True))
    return Window(first.start_s, first.seconds, arrivals, tuple(r for w in windows for r in w.records))
