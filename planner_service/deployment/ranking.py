"""Which replicas to simulate first: a compiled guess of a tier's latency from capacities and load. No I/O."""

from typing import NamedTuple

import numpy as np

from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import F, N

LEAST_SPARE = 0.1  # of the capacity: below it the guess grows no further, for queues then depend on how long it lasts
ROUNDING = 1e-9  # by which a bound is lowered, as sums are rounded


class Kinds(NamedTuple):
    """K kinds of replica under some requests. sizes (K): GPUs. capacity (K): requests per second. alone_mean (K): seconds.

    rate_per_s: of the requests. span_s: from the first arrival to the last.
    """

    sizes: N
    capacity: F
    alone_mean: F
    rate_per_s: float
    span_s: float


@compiled()
def single_estimates(kinds: Kinds, gpus: int, most: int) -> tuple[N, F]:
    """((K) how many replicas of each kind are placed on `gpus`, at most `most`; (K) their estimates, infinite for none)."""
    sizes, capacity, alone_mean, rate_per_s, span_s = kinds
    counts, guesses = np.zeros(len(sizes), np.int64), np.full(len(sizes), np.inf)
    for k in range(len(sizes)):
        counts[k] = min(most, gpus // sizes[k])
        if counts[k] > 0:
            total = capacity[k] * counts[k]
            guesses[k] = estimate_s(total, total * alone_mean[k], rate_per_s, span_s)
    return counts, guesses


@compiled()
def promising_pairs(kinds: Kinds, gpus: int, most: int, keep: int) -> N:
    """The `keep` most promising multisets of two kinds that leave no room for one more replica: rows of (i, n, j, m).

    n and m: counts, m before it is cut to `most`. Ordered by estimate, ties by (i, j, n). Kinds of which no counts can be
    among the best so far are passed over: together they have at most the capacity per GPU of the one, and at least the mean
    latency alone of the other.
    """
    sizes, capacity, alone_mean, rate_per_s, span_s = kinds
    best, row = _no_rows(keep), np.zeros(4, np.int64)
    order, stored = _most_promising_first(kinds, gpus, most), 0
    for first in range(len(order)):
        for second in range(first + 1, len(order)):
            i, j = min(order[first], order[second]), max(order[first], order[second])
            total = gpus * max(capacity[i] / sizes[i], capacity[j] / sizes[j])
            if _is_over(best.estimates[-1], total, total * min(alone_mean[i], alone_mean[j]), rate_per_s):
                continue
            for n in range(1, min(most, (gpus - sizes[j]) // sizes[i]) + 1):
                left = gpus - n * sizes[i]
                m = int((left + 0.5) / sizes[j])
                if left - m * sizes[j] >= sizes[i]:
                    continue
                one, other = capacity[i] * n, capacity[j] * m
                weighted = one * alone_mean[i] + other * alone_mean[j]
                if _is_over(best.estimates[-1], one + other, weighted, rate_per_s):
                    continue
                row[0], row[1], row[2], row[3] = i, n, j, m
                place = (i * len(sizes) + j) * gpus + n
                guess = estimate_s(one + other, weighted, rate_per_s, span_s)
                stored = _keep(row, place, guess, best, stored)
    return best.rows[:stored]


class _Rows(NamedTuple):
    """The most promising rows so far, (M, 4), with their estimates (M), infinite for those to come, and their places
    (M) in the enumeration, by which ties are ordered."""

    rows: N
    estimates: F
    places: N


@compiled()
def _no_rows(most: int) -> _Rows:
    return _Rows(np.zeros((most, 4), np.int64), np.full(most, np.inf), np.zeros(most, np.int64))


@compiled()
def _most_promising_first(kinds: Kinds, gpus: int, most: int) -> N:
    """(K) kinds by the estimate of each alone: the sooner good rows are known, the more others are passed over."""
    return np.argsort(single_estimates(kinds, gpus, most)[1])


@compiled()
def _is_over(limit_s: float, capacity: float, weighted_alone: float, rate_per_s: float) -> bool:
    """Whether the estimate is over the limit whatever the backlog: estimate_s without its divisions, rounded down."""
    over: bool = weighted_alone * (1 - ROUNDING) > limit_s * max(capacity - rate_per_s, LEAST_SPARE * capacity)
    return over


@compiled()
def _keep(row: N, place: int, estimate: float, best: _Rows, stored: int) -> int:
    """Insert a row by its estimate and its place, dropping the last where there are too many; how many there are now."""
    rows, estimates, places = best.rows, best.estimates, best.places
    at = stored
    while at > 0 and (estimates[at - 1] > estimate or (estimates[at - 1] == estimate and places[at - 1] > place)):
        at -= 1
    if at == len(rows):
        return stored
    for other in range(min(stored, len(rows) - 1), at, -1):
        rows[other], estimates[other], places[other] = rows[other - 1], estimates[other - 1], places[other - 1]
    rows[at], estimates[at], places[at] = row, estimate, place
    return min(stored + 1, len(rows))


@compiled()
def estimate_s(capacity: float, weighted_alone: float, rate_per_s: float, span_s: float) -> float:
    """A guess to sort by: mean latency alone, over the share of capacity that is left (at least LEAST_SPARE), and the backlog
    that an overload has piled up by the end of the trace.

    capacity: requests per second of all replicas; weighted_alone: the sum over them of capacity times mean latency alone.
    """
    load = rate_per_s / capacity
    backlog_s = span_s * (1 - 1 / load) if load > 1 else 0.0
    guess: float = weighted_alone / capacity / max(1 - load, LEAST_SPARE) + backlog_s
    return guess
