"""Which replicas to simulate first: a compiled guess of a tier's latency from capacities and load. No I/O."""

import numba
import numpy as np
import numpy.typing as npt

F = npt.NDArray[np.float64]
N = npt.NDArray[np.int64]

LEAST_SPARE = 0.1  # of the capacity: below it the guess grows no further, for queues then depend on how long it lasts
MAX_OTHERS = 4  # in mixes of three kinds, replicas of each kind but the one that fills the rest, at most


@numba.njit(cache=True)
def single_estimates(
    sizes: N, capacity: F, alone_mean: F, rate_per_s: float, span_s: float, gpus: int, most: int
) -> tuple[N, F]:
    """((K) how many replicas of each kind go on `gpus`, at most `most`; (K) their estimates, infinite for none)."""
    counts, guesses = np.zeros(len(sizes), np.int64), np.full(len(sizes), np.inf)
    for k in range(len(sizes)):
        counts[k] = min(most, gpus // sizes[k])
        if counts[k] > 0:
            total = capacity[k] * counts[k]
            guesses[k] = estimate_s(total, total * alone_mean[k], rate_per_s, span_s)
    return counts, guesses


@numba.njit(cache=True)
def promising_pairs(
    sizes: N,  # (K) GPUs of each kind
    capacity: F,  # (K) requests per second
    alone_mean: F,  # (K) seconds
    rate_per_s: float,
    span_s: float,  # from the first arrival to the last
    gpus: int,
    most: int,
    keep: int,
) -> N:
    """The `keep` most promising multisets of two kinds that leave no room for one more replica: rows of (i, n, j, m).

    n and m: counts, m before it is cut to `most`. Ordered by estimate, ties by (i, j, n).
    """
    rows, estimates, stored = np.zeros((keep, 4), np.int64), np.full(keep, np.inf), 0
    row = np.zeros(4, np.int64)
    for i in range(len(sizes)):
        for j in range(i + 1, len(sizes)):
            for n in range(1, min(most, (gpus - sizes[j]) // sizes[i]) + 1):
                left = gpus - n * sizes[i]
                if left % sizes[j] >= sizes[i]:
                    continue
                m = left // sizes[j]
                one, other = capacity[i] * n, capacity[j] * m
                weighted = one * alone_mean[i] + other * alone_mean[j]
                row[0], row[1], row[2], row[3] = i, n, j, m
                stored = _keep(row, estimate_s(one + other, weighted, rate_per_s, span_s), rows, estimates, stored)
    return rows[:stored]


@numba.njit(cache=True)
def promising_triples(
    sizes: N, capacity: F, alone_mean: F, rate_per_s: float, span_s: float, gpus: int, most: int, keep: int
) -> N:
    """The `keep` most promising multisets of three kinds: rows of (i, n, j, m, k, p), as in promising_pairs.

    Of two of the kinds, j and k, there are at most MAX_OTHERS replicas; i fills the rest, and no room is left for one more
    of the smallest of the three. A multiset may come twice, with another of its kinds as i.
    """
    rows, estimates, stored = np.zeros((keep, 6), np.int64), np.full(keep, np.inf), 0
    row = np.zeros(6, np.int64)
    for i in range(len(sizes)):
        for j in range(len(sizes)):
            for k in range(j + 1, len(sizes)):
                if i in (j, k):
                    continue
                smallest = min(sizes[i], sizes[j], sizes[k])
                for m in range(1, min(most, MAX_OTHERS) + 1):
                    for p in range(1, min(most, MAX_OTHERS) + 1):
                        left = gpus - m * sizes[j] - p * sizes[k]
                        if left < sizes[i]:
                            break
                        n = min(most, left // sizes[i])
                        if left - n * sizes[i] >= smallest:
                            continue
                        one, two, three = capacity[i] * n, capacity[j] * m, capacity[k] * p
                        weighted = one * alone_mean[i] + two * alone_mean[j] + three * alone_mean[k]
                        row[0], row[1], row[2], row[3], row[4], row[5] = i, n, j, m, k, p
                        guess = estimate_s(one + two + three, weighted, rate_per_s, span_s)
                        stored = _keep(row, guess, rows, estimates, stored)
    return rows[:stored]


@numba.njit(cache=True)
def _keep(row: N, estimate: float, rows: N, estimates: F, stored: int) -> int:
    """Insert a row by its estimate, behind equal ones, dropping the last where there are too many; how many there are now."""
    if stored == len(rows) and estimate >= estimates[stored - 1]:
        return stored
    at = min(stored, len(rows) - 1)
    while at > 0 and estimates[at - 1] > estimate:
        estimates[at], rows[at] = estimates[at - 1], rows[at - 1]
        at -= 1
    estimates[at], rows[at] = estimate, row
    return min(stored + 1, len(rows))


@numba.njit(cache=True)
def estimate_s(capacity: float, weighted_alone: float, rate_per_s: float, span_s: float) -> float:
    """A guess to sort by: mean latency alone, over the share of capacity that is left (at least LEAST_SPARE), and the backlog
    that an overload has piled up by the end of the trace.

    capacity: requests per second of all replicas; weighted_alone: the sum over them of capacity times mean latency alone.
    """
    load = rate_per_s / capacity
    backlog_s = span_s * (1 - 1 / load) if load > 1 else 0.0
    guess: float = weighted_alone / capacity / max(1 - load, LEAST_SPARE) + backlog_s
    return guess
