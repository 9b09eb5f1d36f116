"""Refines the boundary of an instance from its own sequences and those of its successors (CascadeInfer, section 4.3).

No I/O. Each instance refines its own boundary, so instances of one stage may end at different lengths.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from penstock.services.domain.stages.qoe import BatchLoad, InFlight, batch_quality, even_share
from penstock.types.plans import QoeModel

LEAST_REQUESTS = 5  # with fewer sequences the boundary does not change
SMOOTHING = 0.3  # weight of a new split; the paper smooths and gives no weight


def averaged(successors: Iterable[Seq[InFlight]]) -> Seq[InFlight]:
    """The sequences of an average instance of the next stage: the union, divided by the number of instances."""
    instances = list(successors)
    return even_share(sorted(sequence for instance in instances for sequence in instance), len(instances))


def best_split(ordered: Seq[InFlight], qoe: QoeModel) -> int:
    """B = argmin over 0 <= i < N of Q(R[:i]) + Q(R[i:]), where R is `ordered` by length; the smallest of equal ones."""
    total = BatchLoad.of(ordered)
    lower = BatchLoad()
    best, best_cost = 0, float("inf")
    for i, sequence in enumerate(ordered):
        cost = batch_quality(qoe, lower) + batch_quality(qoe, _minus(total, lower))
        if cost < best_cost:
            best, best_cost = i, cost
        lower = _plus(lower, sequence)
    return best


def refine(
    boundary: float, own: Iterable[InFlight], successor: Seq[InFlight], qoe: QoeModel, *, least: int, most: int
) -> float:
    """The next boundary: the first length, in tokens, beyond the instance's range; a float, so that small changes add up.

    own: the sequences of the instance. successor: those of an average instance of the next stage (`averaged`). least, most:
    limits of the boundary, so that the stages keep their order.
    """
    ordered = sorted((*own, *successor))
    if len(ordered) < LEAST_REQUESTS:
        return boundary
    split = ordered[best_split(ordered, qoe)].tokens
    smoothed = boundary + SMOOTHING * (split - boundary)
    return min(max(smoothed, least), most)


def _plus(load: BatchLoad, sequence: InFlight) -> BatchLoad:
    tokens, inputs = sequence
    return BatchLoad(load[0] + 1, load[1] + inputs, load[2] + inputs * inputs, load[3] + tokens)


def _minus(total: BatchLoad, part: BatchLoad) -> BatchLoad:
    return BatchLoad(total[0] - part[0], total[1] - part[1], total[2] - part[2], total[3] - part[3])
