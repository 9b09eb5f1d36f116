"""The certificate of an admission: the step policy itself, repeated in virtual time until nothing can go wrong. No I/O.

`certified` replays the running requests with a set of candidates, `keeps_promises` any requests.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import (
    COUNTS,
    EPSILON_S,
    RELEASE_S,
    SLACK_PACES,
    TIMES,
    Certificate,
    Columns,
    F,
    Kv,
    Load,
    StepModel,
    base_s,
    step_s,
)
from penstock.services.domain.slo.compiled.selection import ANY_ORDER
from penstock.services.domain.slo.compiled.step import (
    ASSUMED,
    NONE,
    Decodes,
    Prompts,
    Sums,
    form_promised,
    next_due_s,
    promised_decodes,
    promised_prompts,
    sums_of,
)

MAX_STEPS = 20_000
"""A replay gives up, and the admission is refused, after so many steps: at 20 steps a second a quarter of an hour."""


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
    both, now_s, model, kv = _with_chosen(question, chosen), question.now_s, question.model, question.kv
    requests, tries = both.counts.shape[1], 0
    shared, alone = Certificate(np.empty(requests), np.zeros(1)), Certificate(np.empty(requests), np.zeros(1))
    for hold in range(2):
        shared.release_s[:], both.times[RELEASE_S], shared.most_held[0] = -np.inf, -np.inf, 0.0
        passes = keeps_promises(now_s, both, requests, model, np.bool_(True), hold == 1, kv, shared)
        tries += 1
        alone.most_held[0] = shared.most_held[0]
        if passes and model.reserve > 0.0:
            both.times[RELEASE_S] = shared.release_s
            passes = keeps_promises(now_s, both, requests, model, np.bool_(False), np.bool_(False), kv, alone)
        if passes:
            result.most_held[0] = alone.most_held[0]
            result.release_s[:requests] = shared.release_s
            return True, tries, False
        if shared.most_held[0] > kv.tokens:
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


@compiled(error_model="numpy")
def keeps_promises(
    now_s: float,
    columns: Columns,
    requests: int,
    model: StepModel,
    best_effort: bool | np.bool_,
    hold: bool | np.bool_,
    kv: Kv,
    result: Certificate,  # out, where they pass
) -> bool:
    """Whether no standard request misses a deadline, from now to its last token (LEFT), and their KV fits all the time.

    best_effort: while prompts wait, requests without a promise use their reserve of every step.

    A request has a place, and holds the KV of its tokens so far, from the first tokens of its prompt to its last token. A
    prompt that is not complete counts as a whole, since the progress of prompts depends on best effort.
    """
    prompts = promised_prompts(columns, requests)
    decodes, sums = promised_decodes(columns, requests)
    waiting, changed, most_held = len(prompts.column), True, 0.0
    for _ in range(MAX_STEPS):
        if waiting == 0 and changed:
            if _decodes_fit(now_s, decodes, sums, model):
                result.most_held[0] = max(most_held, _most_decodes_hold(decodes, sums.requests, kv.partial_tokens))
                return result.most_held[0] <= kv.tokens
            changed = False
        shared = ASSUMED if best_effort and waiting > 0 else NONE
        due = form_promised(now_s, decodes, sums, prompts, waiting, model, shared, hold)
        took_s = step_s(due.load, model)
        if took_s == 0.0:
            result.most_held[0] = most_held
            return True
        if shared == ASSUMED:  # its reserve will be used
            took_s = max(took_s, min(due.cap_s, took_s / (1.0 - model.reserve)))
        end_s = now_s + took_s
        if due.earliest_s < end_s - EPSILON_S:
            return False
        late, prompts_hold = _late_and_held(prompts, waiting, end_s, kv.partial_tokens)
        if late >= 0:
            result.most_held[0] = result.most_held[0] if prompts.placed[late] else np.inf
            return False
        held = prompts_hold + sums.context + due.load.decodes + sums.requests * (kv.partial_tokens - 1.0)
        most_held = max(most_held, held)
        if held > kv.tokens:
            result.most_held[0] = held
            return False
        count = _advance_decodes(decodes, sums.requests, end_s)
        remaining = 0
        for p in range(waiting):
            prompts.context[p] += prompts.granted[p]
            prompts.pending[p] -= prompts.granted[p]
            if prompts.granted[p] == 0 or prompts.pending[p] > 0:
                _move_prompt(prompts, p, remaining)
                remaining += 1
                continue
            result.release_s[prompts.column[p]] = now_s
            if prompts.left[p] > 1:
                _begin_decoding(decodes, count, prompts, p, end_s)
                count += 1
        if remaining < waiting or count != sums.requests:
            changed = True
            sums = sums_of(decodes, count)
        else:
            longest = max(sums.longest, due.load.longest + 1.0)
            sums = Sums(count, sums.tightest_s, sums.demand_per_s, sums.context + due.load.decodes, longest)
        waiting = remaining
        now_s = end_s
    return False


@compiled(error_model="numpy")
def keep_any_pace(now_s: float, columns: Columns, requests: int, model: StepModel, kv: Kv, result: Certificate) -> bool:
    """Whether promised decodes, without prompts, keep their promises however early steps end and whatever else is in them, as
    far as that fits next to the decodes: every step has all of them, see `_decodes_fit`."""
    decodes, sums = promised_decodes(columns, requests)
    if not _decodes_fit(now_s, decodes, sums, model):
        return False
    result.most_held[0] = _most_decodes_hold(decodes, sums.requests, kv.partial_tokens)
    return result.most_held[0] <= kv.tokens


@compiled(error_model="numpy")
def _late_and_held(prompts: Prompts, waiting: int, end_s: float, partial_tokens: int) -> tuple[int, float]:
    """One that is late, of those that this step completes or leaves out, or -1; those that it continues with are looked at
    later. And the KV of all that have places."""
    late, held = -1, 0.0
    for p in range(waiting):
        goes_on = 0 < prompts.granted[p] < prompts.pending[p]
        if not goes_on and prompts.due_s[p] < end_s - EPSILON_S:
            late = p
        if prompts.placed[p]:
            held += prompts.context[p] + prompts.pending[p] + partial_tokens
    return late, held


@compiled(error_model="numpy")
def _advance_decodes(decodes: Decodes, count: int, end_s: float) -> int:
    """Each that has a token in the step gets it; those that have all of theirs leave. How many are left."""
    if _give_tokens(decodes.granted, decodes.due_s, decodes.tpot_s, decodes.context, decodes.left, count, end_s) == 0:
        return count
    remaining = 0
    for k in range(count):
        if not decodes.granted[k] or decodes.left[k] > 0.0:
            _move_decode(decodes, k, remaining)
            remaining += 1
    return remaining


@compiled(error_model="numpy", fastmath=ANY_ORDER)
def _give_tokens(
    granted: npt.NDArray[np.bool_], due_s: F, tpot_s: F, context: F, left: F, count: int, end_s: float
) -> int:
    """Those granted one get their token (`next_due_s`); how many have all of theirs."""
    ended = 0
    for k in range(count):
        ahead_s = due_s[k] if due_s[k] > end_s else end_s
        most_s = end_s + SLACK_PACES * tpot_s[k]
        ahead_s = (ahead_s if ahead_s < most_s else most_s) + tpot_s[k]
        token = 1.0 if granted[k] else 0.0
        due_s[k] = ahead_s if granted[k] else due_s[k]
        context[k] += token
        left[k] -= token
        ended += granted[k] & (left[k] <= 0.0)
    return ended


@compiled(error_model="numpy")
def _begin_decoding(decodes: Decodes, count: int, prompts: Prompts, p: int, end_s: float) -> None:
    """A prompt has its first token: it is a decode, at its place by arrival."""
    at = count
    while at > 0 and decodes.column[at - 1] > prompts.column[p]:
        _move_decode(decodes, at - 1, at)
        at -= 1
    decodes.column[at], decodes.tpot_s[at] = prompts.column[p], prompts.tpot_s[p]
    decodes.due_s[at] = next_due_s(prompts.due_s[p], end_s, prompts.tpot_s[p], 0)
    decodes.context[at], decodes.left[at] = prompts.context[p], prompts.left[p] - 1


@compiled(error_model="numpy")
def _move_decode(decodes: Decodes, source: int, to: int) -> None:
    if source == to:
        return
    decodes.column[to], decodes.due_s[to] = decodes.column[source], decodes.due_s[source]
    decodes.tpot_s[to], decodes.context[to] = decodes.tpot_s[source], decodes.context[source]
    decodes.left[to] = decodes.left[source]


@compiled(error_model="numpy")
def _move_prompt(prompts: Prompts, source: int, to: int) -> None:
    if source == to:
        return
    prompts.column[to], prompts.placed[to] = prompts.column[source], prompts.placed[source]
    prompts.context[to], prompts.pending[to] = prompts.context[source], prompts.pending[source]
    prompts.left[to], prompts.due_s[to] = prompts.left[source], prompts.due_s[source]
    prompts.tpot_s[to], prompts.release_s[to] = prompts.tpot_s[source], prompts.release_s[source]


@compiled(error_model="numpy")
def _most_decodes_hold(decodes: Decodes, count: int, partial_tokens: int) -> float:
    """The most KV that the decodes hold at any time, if each has a token per step until its last one."""
    held, left = decodes.context[:count] + partial_tokens, np.maximum(1.0, decodes.left[:count])
    total, most = held.sum(), 0.0
    order = np.argsort(left)
    for k in range(count):  # just before the k-th to end leaves
        most = max(most, total + (count - k) * left[order[k]])
        total -= held[order[k]]
    return most


@compiled(error_model="numpy")
def _decodes_fit(now_s: float, decodes: Decodes, sums: Sums, model: StepModel) -> bool:
    """Whether a step with all decodes fits the tightest pace even when each has its longest context.

    Then every step from here on has all of them (they only get fewer), and every token comes in time: when a step ends, each
    next token is due a pace later at least, so the next step has room for all of them again, whatever else this one had.
    """
    count, context, longest, limit_s = sums.requests, 0.0, 0.0, sums.tightest_s
    for k in range(count):
        ends = decodes.context[k] + max(1.0, decodes.left[k])
        context += ends
        longest = max(longest, ends)
        limit_s = min(limit_s, decodes.due_s[k] - now_s)
    if count == 0:
        return True
    if count > model.max_step_tokens:
        return False
    took_s = step_s(Load(count, context, 0.0, count, sums.context, longest), model)
    if not model.rising:  # a step with fewer of them may take longer
        took_s += _slowest_s(count, model) - base_s(count, model)
    return bool(took_s <= limit_s + EPSILON_S)


@compiled(error_model="numpy")
def _slowest_s(tokens: int, model: StepModel) -> float:
    """The longest that a pass of up to so many tokens takes."""
    slowest_s = max(base_s(1, model), base_s(tokens, model))
    for knot in range(len(model.knot_s)):
        if 1 < model.knot_tokens[knot] < tokens:
            slowest_s = max(slowest_s, model.knot_s[knot])
    return float(slowest_s)
