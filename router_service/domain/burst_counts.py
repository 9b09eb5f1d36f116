"""What one router process counts of its plan's burst ladder, and the sum over processes. No I/O."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BurstCounts:
    """step: that new requests take. budget_left: share of the window's budget that is not spent, 0 to 1. out_of_budget: the
    load needs a step that the budget does not allow. changes: of the step, since the process started.

    window_requests, window_quality_sum: requests of the window, and the sum of their planned qualities.
    """

    step: int = 0
    budget_left: float = 0.0
    out_of_budget: bool = False
    changes: int = 0
    window_requests: int = 0
    window_quality_sum: float = 0.0

    def __add__(self, other: "BurstCounts") -> "BurstCounts":
        return BurstCounts(
            max(self.step, other.step),
            min(self.budget_left, other.budget_left),
            self.out_of_budget or other.out_of_budget,
            self.changes + other.changes,
            self.window_requests + other.window_requests,
            self.window_quality_sum + other.window_quality_sum,
        )

    @property
    def window_quality(self) -> float | None:
        """The mean planned quality of the window's requests; None without any."""
        return self.window_quality_sum / self.window_requests if self.window_requests else None
