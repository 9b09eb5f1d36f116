"""The step that is taken: best effort has part in it only where what follows is certified. No I/O.

A certificate replays one way on. Steps that end earlier than it took for granted, because best effort has less to do or
because steps are faster than predicted, may lead to a batch in which a promise breaks: with prompts done and decodes begun
sooner, what is due together differs. So what is certified is always the way on without best effort, which can be taken at
any time, and it is certified again at each step's end:

    a step with best effort is taken only where a replay from its end on passes, else the certified one (`certified_step`);
    where a step has ended early and a replay from there on fails, its tokens come when they were certified to, and so do
    accepted drafts only where a replay with them passes: longer contexts and earlier ends change what follows (`may_end_s`).

Promised decodes that keep their pace whatever else is in their steps need neither (`keep_any_pace`). What is certified is
kept in an array, STATES long:

    PATHS: what passes from AT_S on: bits ALONE (a replay without best effort) and ANY (`keep_any_pace`).
    AT_S: when the next step begins.
    MOST_HELD: the most KV that promised requests hold at any time from here on.
"""

import numpy as np

from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import (
    AGAIN,
    BEST_EFFORT,
    CONTEXT,
    DECODING,
    DUE_S,
    EPSILON_S,
    GONE,
    KIND,
    LEFT,
    PENDING,
    PLACED,
    STANDARD,
    TPOT_S,
    Certificate,
    Columns,
    F,
    Kv,
    N,
    StepModel,
    copied,
    predict_again,
)
from penstock.services.domain.slo.compiled.replay import keep_any_pace, keeps_promises
from penstock.services.domain.slo.compiled.step import NONE, PRESENT, commit, form_batch, next_due_s

PATHS, AT_S, MOST_HELD = range(3)
STATES = 3
ALONE, ANY = 1, 2


@compiled(error_model="numpy")
def certified_step(
    now_s: float,
    columns: Columns,
    requests: int,
    model: StepModel,
    kv: Kv,
    certified: F,  # (STATES) in: as of the step before, or of an admission since; out: at the end of this step
    grants: N,  # (>= requests) out: tokens of each
) -> float:
    """Decide the tokens of the step that begins now; the seconds it will take, 0 for an empty one."""
    paths = int(certified[PATHS])
    if abs(now_s - certified[AT_S]) > EPSILON_S:
        paths = paths & ANY if now_s < certified[AT_S] else 0
    prompts, decodes, best_effort = 0, 0, False
    for i in range(requests):
        if columns.counts[KIND, i] == STANDARD:
            prompts += columns.counts[DECODING, i] == 0
            decodes += columns.counts[DECODING, i] == 1
            if columns.counts[LEFT, i] < 1:
                predict_again(columns.counts, i)
                paths = 0
        best_effort |= columns.counts[KIND, i] == BEST_EFFORT
    shared = PRESENT if best_effort else NONE
    if prompts + decodes == 0:
        took_s, _ = form_batch(now_s, columns, requests, model, shared, np.bool_(False), grants)
        _certify(certified, 0, now_s + took_s, 0.0)
        return took_s
    result = Certificate(np.empty(requests), np.full(1, certified[MOST_HELD]))
    if prompts == 0 and (paths & ANY > 0 or keep_any_pace(now_s, columns, requests, model, kv, result)):
        took_s, _ = form_batch(now_s, columns, requests, model, shared, np.bool_(False), grants)
        _certify(certified, ANY, now_s + took_s, result.most_held[0])
        return took_s
    if best_effort:
        took_s, _ = form_batch(now_s, columns, requests, model, shared, np.bool_(False), grants)
        if certify_after(now_s + took_s, columns, requests, model, kv, certified, grants):
            return took_s
    passes = paths & ALONE > 0
    if not passes:
        passes = keeps_promises(now_s, columns, requests, model, np.bool_(False), np.bool_(False), kv, result)
    took_s, _ = form_batch(now_s, columns, requests, model, NONE, np.bool_(False), grants)
    if passes:
        _certify(certified, ALONE, now_s + took_s, result.most_held[0])
    else:
        _certify(certified, 0, now_s + took_s, max(certified[MOST_HELD], _held(columns, requests, kv, grants)))
    return took_s


@compiled(error_model="numpy")
def may_end_s(
    end_s: float,
    columns: Columns,
    requests: int,
    model: StepModel,
    kv: Kv,
    certified: F,
    grants: N,
    accepted: N,  # (>= requests) in: drafted tokens of each that are right; out: 0 where they must not come
) -> float:
    """When the tokens of a step may come that has been computed by `end_s`."""
    at_s, paths = certified[AT_S], int(certified[PATHS])
    if end_s > at_s + EPSILON_S or paths & ANY > 0 or paths == 0:
        return end_s
    if accepted[:requests].any():
        if _certify_with(end_s, columns, requests, model, kv, certified, grants, accepted):
            return end_s
        accepted[:requests] = 0
    if end_s >= at_s - EPSILON_S:
        return end_s
    return end_s if certify_after(end_s, columns, requests, model, kv, certified, grants) else at_s


@compiled(error_model="numpy")
def certify_after(
    end_s: float, columns: Columns, requests: int, model: StepModel, kv: Kv, certified: F, grants: N
) -> bool:
    """Whether a step with these tokens that ends at `end_s` breaks no promise, nor anything that follows from it."""
    return _certify_with(end_s, columns, requests, model, kv, certified, grants, np.zeros(requests, np.int64))


@compiled(error_model="numpy")
def _certify_with(
    end_s: float, columns: Columns, requests: int, model: StepModel, kv: Kv, certified: F, grants: N, accepted: N
) -> bool:
    """As certify_after, where drafted tokens are accepted as well."""
    counts, times = columns
    for i in range(requests):
        goes_on = 0 < grants[i] < counts[PENDING, i]
        if counts[KIND, i] == STANDARD and not goes_on and times[DUE_S, i] < end_s - EPSILON_S:
            return False
    held = _held(columns, requests, kv, grants) + accepted[:requests].sum()
    if held > kv.tokens:
        return False
    after = copied(columns, requests)
    commit(end_s, after.counts, after.times, requests, grants)
    _add_accepted(end_s, after, requests, accepted)
    for i in range(requests):
        if after.counts[KIND, i] == STANDARD and after.counts[LEFT, i] <= 0:
            if after.counts[AGAIN, i] > 0:
                predict_again(after.counts, i)
            else:
                after.counts[KIND, i] = GONE
    result = Certificate(np.empty(requests), np.zeros(1))
    if not keeps_promises(end_s, after, requests, model, np.bool_(False), np.bool_(False), kv, result):
        return False
    _certify(certified, ALONE, end_s, max(held, result.most_held[0]))
    return True


@compiled(error_model="numpy")
def _add_accepted(end_s: float, columns: Columns, requests: int, accepted: N) -> None:
    """Drafted tokens that are accepted come with the token of the step that ends at `end_s`; each is due a pace later."""
    counts, times = columns
    for i in range(requests):
        counts[CONTEXT, i] += accepted[i]
        counts[LEFT, i] -= accepted[i]
        for _ in range(accepted[i]):
            times[DUE_S, i] = next_due_s(times[DUE_S, i], end_s, times[TPOT_S, i], 1)


@compiled(error_model="numpy")
def _certify(certified: F, paths: int, at_s: float, most_held: float) -> None:
    certified[PATHS], certified[AT_S], certified[MOST_HELD] = paths, at_s, most_held


@compiled(error_model="numpy")
def _held(columns: Columns, requests: int, kv: Kv, grants: N) -> float:
    """KV tokens that promised requests hold at the end of a step with these tokens, prompts counted as a whole."""
    counts, held = columns.counts, 0.0
    for i in range(requests):
        if counts[KIND, i] == STANDARD and (counts[PLACED, i] == 1 or grants[i] > 0):
            held += counts[CONTEXT, i] + (grants[i] if counts[DECODING, i] == 1 else counts[PENDING, i])
            held += kv.partial_tokens
    return held


@compiled(error_model="numpy")
def ended(certified: F, left: int) -> None:
    """A promised request has ended with so many predicted tokens to come: a replay that took it to continue is void."""
    if left > 0:
        certified[PATHS] = int(certified[PATHS]) & ANY
