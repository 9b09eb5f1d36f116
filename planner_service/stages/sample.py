"""The sequences in flight that stages are laid out for. No I/O."""

from dataclasses import dataclass

import numpy as np

from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.simulator.workload import Ints
from penstock.services.domain.errors import invalid
from penstock.types.plans import QoeModel


@dataclass(frozen=True, slots=True, eq=False)
class LengthSample:
    """N sequences as instances hold them at one moment, by ascending length.

    tokens (N): input and output so far. input_tokens (N). output_tokens (N): output when it ends.
    """

    tokens: Ints
    input_tokens: Ints
    output_tokens: Ints

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise invalid("sequences", "at least one is needed to plan by")
        if (self.input_tokens < 0).any() or (self.tokens < self.input_tokens).any() or (self.output_tokens < 1).any():
            raise invalid("sequences", "must hold their input, and end with at least one output token")

    @classmethod
    def of(cls, tokens: Ints, input_tokens: Ints, output_tokens: Ints) -> "LengthSample":
        order = np.lexsort((input_tokens, tokens))
        return cls(tokens[order], input_tokens[order], output_tokens[order])


def count_in_flight(work: Workload, qoe: QoeModel, instances: int, replica: Replica) -> int:
    """Sequences in flight at once: Little's law, their time being output times the QoE model's cost of the batch they make.

    With n in flight on E instances, n = rate * output * (D0 + n / E * m), m being what one mean request adds to the cost.
    Where no n solves it the demand exceeds the instances; then, and above it, n is what the replica's batch and KV hold.
    """
    outputs = work.output_tokens.astype(float)
    weight = outputs / outputs.sum()  # a request is in flight for as long as its output
    inputs = float(weight @ work.input_tokens)
    lengths = float(weight @ (work.input_tokens + outputs / 2))
    d0, d1, d2, d3, d4 = qoe.coefficients
    added = d1 + d2 * inputs + d3 * float(weight @ work.input_tokens.astype(float) ** 2) + d4 * lengths
    tokens_per_s = work.rate_per_s * float(outputs.mean())
    room = instances * min(replica.limits.max_running, replica.lane_tokens / lengths)
    left = 1 - tokens_per_s * added / instances
    expected = tokens_per_s * d0 / left if left > 0 else np.inf
    return max(1, round(min(expected, room)))


def in_flight(work: Workload, count: int) -> LengthSample:
    """`count` sequences in flight: as many of the trace's output tokens, evenly spaced, each with the length it was made at.

    A request is so drawn in proportion to its output, and at every length that it passes with the same chance.
    """
    ends = np.cumsum(work.output_tokens)
    places = ((np.arange(count) + 0.5) * (ends[-1] / count)).astype(np.int64)
    request = np.searchsorted(ends, places, side="right")
    done = places - (ends[request] - work.output_tokens[request])
    inputs = work.input_tokens[request]
    return LengthSample.of(inputs + done + 1, inputs, work.output_tokens[request])
