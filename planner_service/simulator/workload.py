"""Requests to be served, as arrays. No I/O."""

from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.services.domain.errors import invalid

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


MAX_PRIORITY = 1_000_000  # either way: ranks stay within 64 bits
MAX_TOKENS = 2**31 - 1  # of one request: products of two counts stay within 64 bits


class Arrivals(NamedTuple):
    """A Workload as compiled code reads it, (N) each."""

    arrival_s: Floats
    prompt: Ints
    output: Ints
    cached: Ints
    priority: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """N requests in order of arrival.

    arrival_s (N), from any origin, ascending. input_tokens (N), at least 1. output_tokens (N), at least 1.
    priority (N): the higher goes first; of one priority the earlier. All equal where it is not given.
    cached_tokens (N): of the prompt, the first tokens whose KV the engine has when the request comes, so that they are not
    computed (prefix reuse); less than input_tokens. All 0 where it is not given.
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    priority: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    cached_tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if not len(self.priority):
            object.__setattr__(self, "priority", np.zeros(n, np.int64))
        if not len(self.cached_tokens):
            object.__setattr__(self, "cached_tokens", np.zeros(n, np.int64))
        if len(self.priority) != n or (n and np.abs(self.priority).max() > MAX_PRIORITY):
            raise invalid("workload.priority", f"must be {n} numbers from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        if len(self.input_tokens) != n or len(self.output_tokens) != n:
            raise invalid("workload", "arrival_s, input_tokens and output_tokens must have one length")
        if n and (np.diff(self.arrival_s) < 0).any():
            raise invalid("workload.arrival_s", "must ascend")
        if n and (self.input_tokens.min() < 1 or self.output_tokens.min() < 1):
            raise invalid("workload", "a request has at least one input and one output token")
        cached = self.cached_tokens
        if len(cached) != n or (n and (cached.min() < 0 or (cached >= self.input_tokens).any())):
            raise invalid("workload.cached_tokens", f"must be {n} numbers from 0 to less than input_tokens")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def arrivals(self) -> Arrivals:
        return Arrivals(self.arrival_s, self.input_tokens, self.output_tokens, self.cached_tokens, self.priority)

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

    @property
    def mean_tokens(self) -> tuple[float, float, float]:
        """(input, output, cached) of a request, on average; there is at least one."""
        return float(self.input_tokens.mean()), float(self.output_tokens.mean()), float(self.cached_tokens.mean())

    def uncached(self) -> "Workload":
        """The same requests with nothing cached: all prompts are computed whole."""
        return replace(self, cached_tokens=np.zeros(len(self), np.int64))

    def subset(self, chosen: Bools | Ints) -> "Workload":
        return Workload(*(getattr(self, each.name)[chosen] for each in fields(self)))
