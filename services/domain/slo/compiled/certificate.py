"""The certificate of a set of candidates: a replay of the running requests with them. No I/O."""

from typing import NamedTuple

import numpy as np

from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import (
    COUNTS,
    RELEASE_S,
    TIMES,
    Certificate,
    Columns,
    Kv,
    StepModel,
)
from penstock.services.domain.slo.compiled.replay import keeps_promises


class AdmissionQuestion(NamedTuple):
    """A question of admission. now_s: when the next step begins. running: the first `requests` of these columns, as they will
    be then. new: the candidates, by arrival."""

    now_s: float
    running: Columns
    requests: int
    new: Columns
    model: StepModel
    kv: Kv


@compiled(error_model="numpy")
def certified(question: AdmissionQuestion, chosen: int | np.int64, result: Certificate) -> tuple[bool, int, bool]:
    """Replay the running requests with the chosen candidates; `result` is written only where they pass.

    They must pass while best effort uses its reserve, which it has whatever is admitted, and, with the same release
    times, without it: that is what can be taken at any time (`certified_step`).

    Returns whether they pass, how many replays with best effort that took, and whether KV or places are what they fail by.
    """
    both = _with_chosen(question, chosen)
    requests, tries = both.counts.shape[1], 0
    shared, alone = Certificate(np.empty(requests), np.zeros(1)), Certificate(np.empty(requests), np.zeros(1))
    for hold in range(2):
        shared.release_s[:], both.times[RELEASE_S], shared.most_held[0] = -np.inf, -np.inf, 0.0
        passes = keeps_promises(
            question.now_s, both, requests, question.model, np.bool_(True), hold == 1, question.kv, shared
        )
        tries += 1
        alone.most_held[0] = shared.most_held[0]
        if passes and question.model.reserve > 0.0:
            both.times[RELEASE_S] = shared.release_s
            passes = keeps_promises(
                question.now_s, both, requests, question.model, np.bool_(False), np.bool_(False), question.kv, alone
            )
        if passes:
            result.most_held[0] = alone.most_held[0]
            result.release_s[:requests] = shared.release_s
            return True, tries, False
        if shared.most_held[0] > question.kv.tokens:
            return False, tries, True
    return False, tries, False


@compiled(error_model="numpy")
def _with_chosen(question: AdmissionQuestion, chosen: int | np.int64) -> Columns:
    """The running requests and the chosen candidates, without release times."""
    requests = question.requests + count_bits(chosen)
    counts, times = np.empty((COUNTS, requests), np.int64), np.empty((TIMES, requests))
    at = 0
    for i in range(question.requests + question.new.counts.shape[1]):
        c = i - question.requests
        if c >= 0 and chosen >> c & 1 == 0:
            continue
        of, column = (question.running, i) if c < 0 else (question.new, c)
        for row in range(COUNTS):
            counts[row, at] = of.counts[row, column]
        for row in range(TIMES):
            times[row, at] = of.times[row, column]
        times[RELEASE_S, at] = -np.inf
        at += 1
    return Columns(counts, times)


@compiled(error_model="numpy")
def count_bits(bits: int | np.int64) -> int:
    count = 0
    while bits > 0:
        bits &= bits - 1
        count += 1
    return count
