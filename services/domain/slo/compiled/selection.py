"""Finds the earliest of many due times without sorting them. No I/O."""

import numpy as np

from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import F

HALVINGS, FEW = 12, 8  # of the range in which a due time is sought, and of how many it is then selected
ANY_ORDER = {"nnan", "nsz", "reassoc"}
"""Lets loops take several columns at once: no time is NaN, and sums of whole numbers are the same in any order."""


@compiled(error_model="numpy")
def kth_smallest(values: F, k: int) -> float:
    """The element that sorting would put at index `k`; changes the order of `values`.

    Hoare's selection (1961, Algorithm 65: FIND). numba's `np.partition` does the same, but takes seconds to compile.
    """
    low, high = 0, len(values) - 1
    while low < high:
        pivot, i, j = values[(low + high) // 2], low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if k <= j:
            high = j
        elif k >= i:
            low = i
        else:
            break
    return float(values[k])


@compiled(error_model="numpy")
def kth_earliest(due_s: F, count: int, k: int, earliest_s: float) -> float:
    """The due time that sorting would put at index `k` of the first `count`, of which `earliest_s` is the first.

    Counting is much cheaper than moving: halve the range of times until few are left in it, and select among those.
    """
    low_s, high_s, below, up_to = earliest_s, _latest(due_s, count), 0, count
    if low_s == high_s:
        return low_s
    low_s = -np.inf  # not in the range itself
    middle_s = 0.5 * (earliest_s + high_s)
    for _ in range(HALVINGS):
        if up_to - below <= FEW or not np.isfinite(middle_s):
            break
        at_most = _due_by(due_s, count, middle_s)
        if at_most > k:
            high_s, up_to = middle_s, at_most
        else:
            low_s, below = middle_s, at_most
        middle_s = 0.5 * (max(low_s, earliest_s) + high_s)
    some, n = np.empty(up_to - below), 0
    for i in range(count):
        if low_s < due_s[i] <= high_s:
            some[n] = due_s[i]
            n += 1
    return kth_smallest(some, k - below)


@compiled(error_model="numpy", fastmath=ANY_ORDER)
def _latest(due_s: F, count: int) -> float:
    latest_s = -np.inf
    for k in range(count):
        latest_s = due_s[k] if due_s[k] > latest_s else latest_s
    return latest_s


@compiled(error_model="numpy")
def _due_by(due_s: F, count: int, at_s: float) -> int:
    due = 0
    for k in range(count):
        due += due_s[k] <= at_s
    return due
