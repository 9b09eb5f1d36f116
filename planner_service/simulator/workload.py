"""Requests to be served, as arrays. No I/O."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.domain.errors import invalid

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """N requests in order of arrival.

    arrival_s (N), from any origin, ascending. input_tokens (N), at least 1. output_tokens (N), at least 1.
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if len(self.input_tokens) != n or len(self.output_tokens) != n:
            raise invalid("workload", "arrival_s, input_tokens and output_tokens must have one length")
        if n and (np.diff(self.arrival_s) < 0).any():
            raise invalid("workload.arrival_s", "must ascend")
        if n and (self.input_tokens.min() < 1 or self.output_tokens.min() < 1):
            raise invalid("workload", "a request has at least one input and one output token")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def longest_tokens(self) -> int:
        """Of one request, input and output; 0 for no requests."""
        return int((self.input_tokens + self.output_tokens).max()) if len(self) else 0

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per second; infinite where all come at once."""
        if len(self) < 2:
            return 0.0
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span if span > 0 else float("inf")

    def subset(self, chosen: Bools | Ints) -> "Workload":
        return Workload(self.arrival_s[chosen], self.input_tokens[chosen], self.output_tokens[chosen])
