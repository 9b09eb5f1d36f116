"""Judges tokens against their SLOs while they are simulated, compiled. No I/O.

The compiled version of `services.domain.slo.attainment`: a first token is late after its deadline, a pace is judged
over every window of ten gaps, and over the whole of a shorter reply. A property test drives both with the same tokens.
"""

from typing import NamedTuple

import numpy as np

from penstock.services.compilation import compiled
from penstock.services.domain.slo.attainment import PACE_WINDOW_TOKENS, TOLERANCE_S
from penstock.services.domain.slo.compiled.layout import F, N


class Slos(NamedTuple):
    """What was promised to R requests, (R) each, in seconds.

    first_due_s: when the first token is due; infinite for no promise. tpot_s: seconds per output token; infinite likewise.
    later_tpot_s: the same from output token `later_from` on (counted from 0), for replies of two phases.
    """

    first_due_s: F
    tpot_s: F
    later_tpot_s: F
    later_from: N


class Judgement(NamedTuple):
    """What R requests received. tokens (R); allowed_s (R): seconds that the paces of all gaps so far add up to; lead_s
    (R, PACE_WINDOW_TOKENS): of the last tokens, their time less what was allowed until then; misses (R): late first tokens
    and late windows.
    """

    tokens: N
    allowed_s: F
    lead_s: F
    misses: N


def new_judgement(requests: int) -> Judgement:
    zeros = np.zeros((2, requests), np.int64)
    return Judgement(zeros[0], np.zeros(requests), np.zeros((requests, PACE_WINDOW_TOKENS)), zeros[1])


@compiled(allocates=False)
def judge_token(r: int, at_s: float, last: bool, slos: Slos, judgement: Judgement) -> None:
    """A token of request r came at `at_s`; `last`: it is the last one of its reply."""
    k = judgement.tokens[r]
    judgement.tokens[r] = k + 1
    if k == 0:
        judgement.misses[r] += at_s > slos.first_due_s[r] + TOLERANCE_S
        judgement.lead_s[r, 0] = at_s
        return
    pace_s = slos.tpot_s[r] if k < slos.later_from[r] else slos.later_tpot_s[r]
    if pace_s == np.inf:
        return
    judgement.allowed_s[r] += pace_s
    lead_s = at_s - judgement.allowed_s[r]
    if k >= PACE_WINDOW_TOKENS:
        judgement.misses[r] += lead_s - judgement.lead_s[r, k % PACE_WINDOW_TOKENS] > TOLERANCE_S
    elif last:
        judgement.misses[r] += lead_s - judgement.lead_s[r, 0] > TOLERANCE_S
    judgement.lead_s[r, k % PACE_WINDOW_TOKENS] = lead_s
