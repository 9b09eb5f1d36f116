"""The replicas of a tier take turns, each in proportion to its share, compiled. No I/O."""

import numpy as np
import numpy.typing as npt

from penstock.services.compilation import compiled

F = npt.NDArray[np.float64]
N = npt.NDArray[np.int64]


@compiled()
def take_turns(share: F, owner: N) -> None:
    """Smooth weighted round robin: turn i of replica r is at (i + 1/2) / share[r], ties by replica. owner (N): out.

    Neighbours of equal share take each turn together: the turns of such groups are merged, not those of replicas.
    """
    replicas, count = len(share), len(owner)
    begin, groups = np.zeros(replicas + 1, np.int64), 0
    for r in range(replicas):
        if r == 0 or share[r] != share[r - 1]:
            begin[groups] = r
            groups += 1
    begin[groups] = replicas
    turn, at = np.zeros(groups, np.int64), np.zeros(groups)
    turns = np.zeros(groups, np.int64)  # that a replica takes at most
    for g in range(groups):
        at[g] = 0.5 / share[begin[g]]
        turns[g] = int(np.ceil(share[begin[g]] * count)) + 1
    done = 0
    while done < count:
        first = 0
        for g in range(1, groups):
            if at[g] < at[first]:
                first = g
        for r in range(begin[first], min(begin[first + 1], begin[first] + count - done)):
            owner[done] = r
            done += 1
        turn[first] += 1
        at[first] = (turn[first] + 0.5) / share[begin[first]] if turn[first] < turns[first] else np.inf
