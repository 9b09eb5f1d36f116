"""What routers report about the requests they serve, so that a plan can follow its workload. No prompt text. No I/O."""

from dataclasses import dataclass

PARTS = 10  # of a window, whose arrivals are counted one by one: they tell how bursty arrivals are


@dataclass(frozen=True, slots=True)
class TierVisit:
    """One tier's work on a request. score: None where nobody judged it, as on the last tier."""

    tier: str
    output_tokens: int
    score: float | None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request of the cascade. arrival_s: since the epoch. weight: how many requests it stands for."""

    arrival_s: float
    input_tokens: int
    visits: tuple[TierVisit, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Window:
    """`seconds` from `start_s` (since the epoch) on: arrivals in each of its PARTS, and a sample of what finished."""

    start_s: float
    seconds: float
    arrivals: tuple[int, ...]
    records: tuple[RequestRecord, ...]

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


def joined(windows: list[Window]) -> Window:
    """What several routers report about the same time."""
    first = windows[0]
    arrivals = tuple(sum(parts) for parts in zip(*(w.arrivals for w in windows), strict=True))
    return Window(first.start_s, first.seconds, arrivals, tuple(r for w in windows for r in w.records))
