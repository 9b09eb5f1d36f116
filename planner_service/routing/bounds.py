"""Lower bounds of the slowest tier's latency for every routing at once, compiled. No I/O."""

import numpy as np
import numpy.typing as npt

from penstock.services.compilation import compiled

F = npt.NDArray[np.float64]
N = npt.NDArray[np.int64]


@compiled()
def percentile_bounds(
    scores: F,  # (2, R) of each request at the two tiers below; one that is always below where there is none
    first: F,  # (A) thresholds of the one
    second: F,  # (B) thresholds of the other
    counts: N,  # (A, B) how many requests are below both
    seconds: F,  # (R) what a request takes at least
    slowest: N,  # (R) the requests, by seconds descending
    share: float,  # the percentile, from 0 to 1
) -> F:
    """(A, B): the percentile of `seconds` over the requests below both thresholds, or a little less; 0 for no requests."""
    bounds = np.zeros((len(first), len(second)))
    for a in range(len(first)):
        for b in range(len(second)):
            missing = counts[a, b] - int(np.floor(share * (counts[a, b] - 1)))  # from the slowest down
            if counts[a, b] == 0:
                continue
            for r in slowest:
                if scores[0, r] < first[a] and scores[1, r] < second[b]:
                    missing -= 1
                    if missing == 0:
                        bounds[a, b] = seconds[r]
                        break
    return bounds
