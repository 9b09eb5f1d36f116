"""A tier that is an API of others, in virtual time: no GPUs, a price per token, limits on the rate. No I/O."""

from dataclasses import dataclass

import numpy as np

from penstock.planner_service.simulator.tier import Served
from penstock.planner_service.simulator.workload import Floats, Workload


@dataclass(frozen=True, slots=True)
class RemoteTier:
    """What the API takes and costs, as its user states it.

    first_token_s, token_s: seconds until the first token and for each later one, whatever the load. requests_per_s,
    tokens_per_s (input and output): its limits, over the mean of arrivals; infinite for none.
    """

    first_token_s: float
    token_s: float
    dollars_per_input_token: float
    dollars_per_output_token: float
    requests_per_s: float = float("inf")
    tokens_per_s: float = float("inf")

    def serve(self, work: Workload) -> Served:
        first_s = work.arrival_s + self.first_token_s
        return Served(first_s, work.arrival_s + self.latency_s(work), np.zeros(len(work), np.int64), 0.0, 0, 0)

    def latency_s(self, work: Workload) -> Floats:
        """(N) seconds from arrival to last token."""
        return np.asarray(self.first_token_s + self.token_s * (work.output_tokens - 1), np.float64)

    def sustained_per_s(self, work: Workload) -> float:
        """Requests of such lengths per second that the limits allow; `work` has at least one. Infinite without limits."""
        tokens = float((work.input_tokens + work.output_tokens).mean())
        return min(self.requests_per_s, self.tokens_per_s / tokens)

    def dollars(self, work: Workload) -> float:
        """What all requests cost together."""
        return float(
            work.input_tokens.sum() * self.dollars_per_input_token
            + work.output_tokens.sum() * self.dollars_per_output_token
        )
