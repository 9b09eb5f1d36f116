"""The QoE model: the latency cost of a batch to its requests (CascadeInfer, section 4.1). No I/O.

The cost q of a request is its normalised latency: seconds from arrival to last token, per output token. All n requests of a
batch have the same cost, and the quality of the batch is the sum (equation 1); lower is better:

    Q_B = n * q,    q = D0 + D1 n + D2 sum I + D3 sum I^2 + D4 sum L

over the batch's requests, each with an input of I tokens and a length of L tokens so far, input and output.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from penstock.types.plans import QoeModel
from penstock.types.problems import FieldProblem
from penstock.types.ranges import own_range_problems

T = TypeVar("T")


class InFlight(NamedTuple):
    """A sequence in flight. tokens: input and output so far. Sorts by length."""

    tokens: int
    input_tokens: int


class BatchLoad(NamedTuple):
    """F1 to F4 of equation 1: the number of requests, and the sums of I, I^2 and L over them. Loads are additive."""

    requests: float = 0.0
    input_tokens: float = 0.0
    input_tokens_squared: float = 0.0
    tokens: float = 0.0

    @classmethod
    def of(cls, sequences: Iterable[InFlight]) -> "BatchLoad":
        n = inputs = squared = tokens = 0
        for length, prompt in sequences:
            n, inputs, squared, tokens = n + 1, inputs + prompt, squared + prompt * prompt, tokens + length
        return cls(n, inputs, squared, tokens)


def qoe_problems(model: QoeModel, path: str = "qoe") -> Iterator[FieldProblem]:
    yield from own_range_problems(model, path)
    if not any(model.coefficients):
        yield FieldProblem(path, "at least one coefficient must be positive")


def request_cost_s(model: QoeModel, load: BatchLoad) -> float:
    """q: seconds per output token for each request of the batch."""
    d0, d1, d2, d3, d4 = model.coefficients
    n, inputs, squared, tokens = load
    return d0 + d1 * n + d2 * inputs + d3 * squared + d4 * tokens


def batch_quality(model: QoeModel, load: BatchLoad) -> float:
    """Q_B; 0 for an empty batch. Lower is better."""
    return load.requests * request_cost_s(model, load)


def even_share(ordered: Sequence[T], parts: int) -> Sequence[T]:
    """One of `parts` similar shares of a sorted sequence: every parts-th element from the (parts/2)-th on (section 4.2,
    footnote).

    With fewer elements than parts, there are as many parts as elements.
    """
    parts = max(1, min(parts, len(ordered)))
    return ordered[parts // 2 :: parts]
