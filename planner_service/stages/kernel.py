"""The inner loops of the partition, compiled. No I/O."""

import numpy as np

from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import F, N


@compiled()
def stage_qualities(tokens: F, inputs: F, ends: N, instances: int, d: F) -> F:
    """(C, C, E + 1): total QoE of the sequences between two cut points on k instances, each with an even share of them.

    k Q(n / k), all sums divided by k. No more instances count than there are sequences. tokens, inputs (n): lengths of the
    sequences, ascending, and their inputs. ends (C): how many are shorter than each cut point. d (5): D0 to D4.
    """
    n, cuts = len(tokens), len(ends)
    sums = np.zeros((n + 1, 3))
    for i in range(n):
        sums[i + 1, 0] = sums[i, 0] + inputs[i]
        sums[i + 1, 1] = sums[i, 1] + inputs[i] * inputs[i]
        sums[i + 1, 2] = sums[i, 2] + tokens[i]
    qualities = np.zeros((cuts, cuts, instances + 1))
    for a in range(cuts):
        for b in range(a + 1, cuts):
            held = ends[b] - ends[a]
            added = d[1] * held
            for f in range(3):
                added += d[2 + f] * (sums[ends[b], f] - sums[ends[a], f])
            for k in range(1, instances + 1):
                qualities[a, b, k] = held * (d[0] + added / max(1, min(k, held)))
    return qualities


@compiled()
def partition(quality: F, crossing: F, best: F, from_instances: N, from_cut: N) -> None:
    """The paper's recurrence (section 4.2).

    quality (C, C, E + 1): of stage_qualities. crossing (C): cost of moving sequences over each cut. best, from_instances,
    from_cut (E + 1, C): out, the last two e' and l' of the best choice.

    f[s,e,l] is the least total QoE of the sequences shorter than l on e instances in s stages:

        f[s,e,l] = min over e' < e, l' < l of  f[s-1,e',l'] + (e - e') Q(n_{l',l} / (e - e')) + c[l'].

    The cost of a stage does not depend on s, and the answer is the least over s. So the minimum over s is taken at once:
    f[e,l] = min over s of f[s,e,l] obeys the same recurrence without s, of E^2 C^2 / 4 terms instead of E^3 C^2.
    """
    instances, cuts = best.shape[0] - 1, best.shape[1]
    best[:] = np.inf
    best[0, 0] = 0.0
    for e in range(1, instances + 1):
        for b in range(1, cuts):
            least, at_e, at_b = np.inf, 0, 0
            for a in range(b):
                if a == 0:  # the first stage
                    value = quality[0, b, e]
                    if value < least:
                        least, at_e, at_b = value, 0, 0
                    continue
                for before in range(1, e):
                    value = best[before, a] + quality[a, b, e - before] + crossing[a]
                    if value < least:
                        least, at_e, at_b = value, before, a
            best[e, b] = least
            from_instances[e, b] = at_e
            from_cut[e, b] = at_b
