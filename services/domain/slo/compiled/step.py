"""Forms the next batch under SLOs: section 3.2.2 and Algorithm 2, one step at a time. No I/O.

A step may take as long as the earliest token of a decode allows, and takes as many tokens as fit in that time:

1. Decodes, by when their next token is due: all that cannot wait for one more step, and at least the share of this step that
   their paces ask for together (sum of step / tpot), so that requests of a loose pace do not fall due all at once.
   (Algorithm 2, line 9, prints `schDDL >= i t0`; a token must be in the batch if it is due before the next one can end.)
2. Prompts of standard requests, by deadline. The last token of a prompt waits for its release time, which the certificate
   of its admission set: a prompt that completes early decodes early, which may break what others were promised.
   Only so many requests have places: one that has none waits for one that is given back.
   A prompt that would be late next to the decodes goes alone and first, where all of them can wait for the next step.
3. The other decodes, where there is time left.
4. Best effort: its decodes, then its prompts, in order of arrival. `reserve` of the step's time is kept for it, but for
   prompts that cannot wait: these may borrow it. Certificates assume that best effort always has work and lends nothing.

A request that was promised a first token only decodes in part 3 from then on, ahead of best effort: its next token is never
due. Whether best effort takes part in a step at all is for `certified_step` to say.

A pace is judged over every window of ten gaps, and kept by a stricter rule (`next_due_s`): a token is due a pace after the
time at which the one before was due, and at most SLACK_PACES further after the time at which that came. So what came early
may be used later, for instance by a prompt that does not fit between two tokens. TPOT_S is KEPT_SHARE of the promised pace:

    due[k + 10] <= due[k] + 10 tpot <= came[k] + SLACK_PACES tpot + 10 tpot = came[k] + (10 - LATE_PACES) promised.

The first token counts as due when it came, so that a reply shorter than a window is in time as a whole, too.

What is promised (parts 1 to 3) is formed on columns without gaps, by one function for steps that are served and for those
that a certificate repeats. One decision repeats hundreds of them, so columns hold only what decodes or waits, and what is the
same for every step is summed up once.

Numbers are divided as numpy does (`error_model`): a check for zero at every division costs more than the division, and keeps
loops from taking several columns at once. Divisors are paces and distances of knots, which are never zero.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import (
    BEST_EFFORT,
    CONTEXT,
    DECODING,
    DUE_S,
    EPSILON_S,
    KIND,
    LEFT,
    NO_LOAD,
    PENDING,
    PLACED,
    RELEASE_S,
    SLACK_PACES,
    STANDARD,
    TPOT_S,
    Columns,
    F,
    Load,
    N,
    StepModel,
    base_s,
    step_s,
    tokens_within,
    with_chunk,
    with_decode,
)
from penstock.services.domain.slo.compiled.selection import ANY_ORDER, kth_earliest

# Whether best effort has work in a step.
NONE, PRESENT, ASSUMED = range(3)


class Decodes(NamedTuple):
    """Requests that decode, (D) each, by arrival.

    column: of the request. context: tokens whose KV is there. left: tokens to come. granted: has a token in this step.
    """

    column: N
    due_s: F
    tpot_s: F
    context: F
    left: F
    granted: npt.NDArray[np.bool_]


class Prompts(NamedTuple):
    """Requests whose prompts are to be computed, (P) each, earliest deadline first. granted: tokens in this step. placed: has
    a place, or gets one in this step."""

    column: N
    due_s: F
    tpot_s: F
    release_s: F
    context: N
    pending: N
    left: N
    granted: N
    placed: npt.NDArray[np.bool_]


class Sums(NamedTuple):
    """Over all decodes: how many, the tightest pace, tokens per second that their paces ask for, context and the longest of
    it, each with one more token."""

    requests: int
    tightest_s: float
    demand_per_s: float
    context: float
    longest: float


class DueStep(NamedTuple):
    """What a step computes. earliest_s: when the first token of a decode is due. cap_s: how long the step may take, infinite
    without limit."""

    load: Load
    earliest_s: float
    cap_s: float


@compiled(error_model="numpy")
def promised_decodes(columns: Columns, requests: int) -> tuple[Decodes, Sums]:
    """The promised requests that decode, with room for all others; what they add up to."""
    decodes = Decodes(
        np.empty(requests, np.int64),
        np.empty(requests),
        np.empty(requests),
        np.empty(requests),
        np.empty(requests),
        np.empty(requests, np.bool_),
    )
    counts, times = columns
    n = 0
    for i in range(requests):
        if counts[KIND, i] == STANDARD and counts[DECODING, i] == 1:
            decodes.column[n] = i
            decodes.due_s[n], decodes.tpot_s[n] = times[DUE_S, i], times[TPOT_S, i]
            decodes.context[n], decodes.left[n] = counts[CONTEXT, i], counts[LEFT, i]
            n += 1
    return decodes, sums_of(decodes, n)


@compiled(error_model="numpy")
def sums_of(decodes: Decodes, count: int) -> Sums:
    tightest_s, demand_per_s, context, longest = np.inf, 0.0, 0.0, 0.0
    for k in range(count):
        tightest_s = min(tightest_s, decodes.tpot_s[k])
        demand_per_s += 1.0 / decodes.tpot_s[k]
        context += decodes.context[k] + 1.0
        longest = max(longest, decodes.context[k] + 1.0)
    return Sums(count, tightest_s, demand_per_s, context, longest)


@compiled(error_model="numpy")
def promised_prompts(of: Columns, requests: int) -> Prompts:
    """The promised requests whose prompts are to be computed, earliest deadline first."""
    counts, times = of
    order, prompts = np.empty(requests, np.int64), 0
    for i in range(requests):
        if counts[KIND, i] == STANDARD and counts[DECODING, i] == 0:
            at = prompts
            while at > 0 and times[DUE_S, order[at - 1]] > times[DUE_S, i]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = i
            prompts += 1
    columns = order[:prompts].copy()
    due_s, tpot_s, release_s = np.empty(prompts), np.empty(prompts), np.empty(prompts)
    context, pending = np.empty(prompts, np.int64), np.empty(prompts, np.int64)
    left, granted = np.empty(prompts, np.int64), np.zeros(prompts, np.int64)
    placed = np.empty(prompts, np.bool_)
    for p in range(prompts):
        i = columns[p]
        due_s[p], tpot_s[p], release_s[p] = times[DUE_S, i], times[TPOT_S, i], times[RELEASE_S, i]
        context[p], pending[p], left[p] = counts[CONTEXT, i], counts[PENDING, i], counts[LEFT, i]
        placed[p] = counts[PLACED, i] == 1
    return Prompts(columns, due_s, tpot_s, release_s, context, pending, left, granted, placed)


@compiled(error_model="numpy", fastmath=ANY_ORDER)
def _earliest(due_s: F, count: int, now_s: float, within_s: float) -> tuple[float, int]:
    """The earliest of them, and how many are due within so many seconds."""
    earliest_s, urgent = np.inf, 0
    for k in range(count):
        at_s = due_s[k]
        earliest_s = at_s if at_s < earliest_s else earliest_s
        urgent += at_s - now_s < within_s
    return earliest_s, urgent


@compiled(error_model="numpy")
def _take_earliest(decodes: Decodes, count: int, quota: int, earliest_s: float) -> tuple[float, float]:
    """Grant a token to the `quota` decodes that are due first, ties by arrival; their context and the longest of it."""
    last_s = kth_earliest(decodes.due_s, count, quota - 1, earliest_s)
    taken = _take_due(decodes.due_s, decodes.granted, count, last_s)
    k = count - 1
    while taken > quota:  # the last to come of those that are due together wait
        if decodes.due_s[k] == last_s:
            decodes.granted[k] = False
            taken -= 1
        k -= 1
    return _granted_context(decodes.context, decodes.granted, count)


@compiled(error_model="numpy")
def _take_due(due_s: F, granted: npt.NDArray[np.bool_], count: int, last_s: float) -> int:
    taken = 0
    for k in range(count):
        granted[k] = due_s[k] <= last_s
        taken += due_s[k] <= last_s
    return taken


@compiled(error_model="numpy", fastmath=ANY_ORDER)
def _granted_context(context: F, granted: npt.NDArray[np.bool_], count: int) -> tuple[float, float]:
    total, longest = 0.0, 0.0
    for k in range(count):
        ends = context[k] + 1.0 if granted[k] else 0.0
        total += ends
        longest = ends if ends > longest else longest
    return total, longest


@compiled(error_model="numpy")
def form_promised(
    now_s: float,
    decodes: Decodes,
    sums: Sums,
    prompts: Prompts,
    waiting: int,  # prompts
    model: StepModel,
    best_effort: int,  # NONE, PRESENT, or ASSUMED by a certificate
    hold: bool | np.bool_,  # prompts complete as late as they can, whatever their release times
) -> DueStep:
    """Decide which promised tokens the step has that begins now: parts 1 to 3."""
    longest_step_s = min(sums.tightest_s, base_s(model.max_step_tokens, model))
    step = _Step(now_s, longest_step_s, 2.0 * longest_step_s - EPSILON_S, best_effort, hold)
    due = _urgent_decodes(step, decodes, sums, model)
    if due.load.decodes > 0 and waiting > 0:
        may_begin = prompts.placed[0] or _free_places(sums, prompts, waiting, model) > 0
        later_s = _alone_first_s(now_s, sums, prompts, due, model) if may_begin else np.inf
        if later_s < np.inf:
            due = DueStep(NO_LOAD, due.earliest_s, due.cap_s - later_s)
    if due.load.decodes == 0:
        decodes.granted[: sums.requests] = False
    if waiting > 0:
        due = _with_prompts(step, due, sums, prompts, waiting, model)
    if due.load.decodes < sums.requests:
        due = DueStep(_with_other_decodes(due, decodes, sums, model), due.earliest_s, due.cap_s)
    return due


class _Step(NamedTuple):
    """What the parts of a step share. cannot_wait_s: what is due within so many seconds is late in the next step."""

    now_s: float
    longest_step_s: float
    cannot_wait_s: float
    best_effort: int
    hold: bool | np.bool_


@compiled(error_model="numpy")
def _urgent_decodes(step: _Step, decodes: Decodes, sums: Sums, model: StepModel) -> DueStep:
    """Part 1: decodes that cannot wait, and the share of all that their paces ask for.

    quota = max(urgent, ceil(min(limit, longest step) * sum over decodes of 1 / tpot))
    """
    if sums.requests == 0:
        return DueStep(NO_LOAD, np.inf, np.inf)
    earliest_s, urgent = _earliest(decodes.due_s, sums.requests, step.now_s, step.cannot_wait_s)
    limit_s = earliest_s - step.now_s
    quota = int(np.ceil(sums.demand_per_s * max(0.0, min(limit_s, step.longest_step_s)) - EPSILON_S))
    quota = min(max(quota, urgent), sums.requests, model.max_step_tokens)
    context, longest = 0.0, 0.0
    if quota == sums.requests:
        context, longest = sums.context, sums.longest
        decodes.granted[: sums.requests] = True
    elif quota > 0:
        context, longest = _take_earliest(decodes, sums.requests, quota, earliest_s)
    return DueStep(Load(quota, context, 0.0, quota, context, longest), earliest_s, limit_s)


@compiled(error_model="numpy")
def _free_places(sums: Sums, prompts: Prompts, waiting: int, model: StepModel) -> int:
    places = model.places - sums.requests
    for p in range(waiting):
        places -= prompts.placed[p]
    return places


@compiled(error_model="numpy")
def _with_prompts(step: _Step, due: DueStep, sums: Sums, prompts: Prompts, waiting: int, model: StepModel) -> DueStep:
    """Part 2: prompts by deadline, as far as they have places."""
    load, cap_s, room = due.load, due.cap_s, model.max_step_tokens
    places, first = _free_places(sums, prompts, waiting, model), -1
    prompts.granted[:waiting] = 0
    for p in range(waiting):
        if load.tokens >= room:
            break
        if not prompts.placed[p] and places <= 0:
            continue
        first = p if first < 0 or (prompts.placed[p] and not prompts.placed[first]) else first
        slack_s = prompts.due_s[p] - step.now_s
        released = not step.hold and step.now_s >= prompts.release_s[p] - EPSILON_S
        allowed = prompts.pending[p] - (0 if slack_s < step.cannot_wait_s or released else 1)
        if allowed <= 0:
            continue
        lends = step.best_effort == PRESENT and slack_s < step.cannot_wait_s
        reserved = step.best_effort != NONE and not lends
        within_s = cap_s * (1.0 - model.reserve) if reserved and cap_s < np.inf else cap_s
        c = tokens_within(within_s, min(allowed, room - load.tokens), prompts.context[p], load, model)
        if c <= 0:
            break
        places -= not prompts.placed[p]
        prompts.placed[p], prompts.granted[p] = True, c
        load = with_chunk(load, prompts.context[p], c)
        if c == prompts.pending[p]:  # its first token comes at the end of this step
            cap_s = min(cap_s, max(slack_s, step_s(load, model)))

    # nothing but last tokens that wait: do not be idle
    if load.tokens == 0 and first >= 0:
        c = min(prompts.pending[first], room)
        prompts.placed[first], prompts.granted[first] = True, c
        load = with_chunk(load, prompts.context[first], c)
        cap_s = max(prompts.due_s[first] - step.now_s, step_s(load, model))

    for p in range(waiting):
        # one that continues, or waits for a place, must not be held up by what fills the step
        if prompts.granted[p] < prompts.pending[p]:
            cap_s = min(cap_s, max(step.longest_step_s, step_s(load, model)))
            break
    return DueStep(load, due.earliest_s, cap_s)


@compiled(error_model="numpy")
def _with_other_decodes(due: DueStep, decodes: Decodes, sums: Sums, model: StepModel) -> Load:
    """Part 3: decodes that could have waited."""
    load = due.load
    for k in range(sums.requests):
        if load.tokens >= model.max_step_tokens:
            break
        if decodes.granted[k]:
            continue
        wider = with_decode(load, decodes.context[k])
        if step_s(wider, model) > due.cap_s + EPSILON_S:
            break
        decodes.granted[k], load = True, wider
    return load


@compiled(error_model="numpy")
def _alone_first_s(now_s: float, sums: Sums, prompts: Prompts, due: DueStep, model: StepModel) -> float:
    """Seconds of a step with all decodes, where the first prompt goes before it alone; infinite where it does not.

    It does where it would be late in a step with the decodes of `due` and is not without them, and they can all wait for the
    step after it: the short prompt of a request whose first token is due within little more than a step.
    """
    slack_s = prompts.due_s[0] - now_s
    count, start = prompts.pending[0], prompts.context[0]
    together = step_s(with_chunk(due.load, start, count), model)
    if together <= slack_s + EPSILON_S or count > model.max_step_tokens:
        return np.inf
    alone = step_s(with_chunk(NO_LOAD, start, count), model)
    if alone > slack_s + EPSILON_S:
        return np.inf
    later: float = step_s(Load(sums.requests, sums.context, 0.0, sums.requests, sums.context, sums.longest), model)
    fits = sums.requests <= model.max_step_tokens and alone + later <= due.cap_s + EPSILON_S
    return later if fits else np.inf


@compiled(error_model="numpy")
def next_due_s(due_s: float, end_s: float, tpot_s: float, decoding: int) -> float:
    """When the token is due after one that came at `end_s` and was due at `due_s`. decoding: 0 if that was the first one."""
    ahead_s = min(max(due_s, end_s), end_s + SLACK_PACES * tpot_s) if decoding == 1 else end_s
    return float(ahead_s + tpot_s)


@compiled(error_model="numpy")
def form_batch(
    now_s: float,
    columns: Columns,
    requests: int,
    model: StepModel,
    best_effort: int,  # NONE, PRESENT, or ASSUMED by a certificate
    hold: bool | np.bool_,  # prompts complete as late as they can, whatever their release times
    grants: N,  # (>= requests) out: tokens of each
) -> tuple[float, float]:
    """Decide the tokens of the step that begins now.

    Returns the seconds it will take, 0 for an empty one, and the seconds it may take (infinite without limit).
    """
    decodes, sums = promised_decodes(columns, requests)
    prompts = promised_prompts(columns, requests)
    due = form_promised(now_s, decodes, sums, prompts, len(prompts.column), model, best_effort, hold)
    grants[:requests] = 0
    for k in range(sums.requests):
        grants[decodes.column[k]] = decodes.granted[k]
    for p in range(len(prompts.column)):
        grants[prompts.column[p]] = prompts.granted[p]
    load = _with_best_effort(due, columns.counts, requests, model, grants) if best_effort == PRESENT else due.load
    return step_s(load, model), due.cap_s


@compiled(error_model="numpy")
def _with_best_effort(due: DueStep, counts: N, requests: int, model: StepModel, grants: N) -> Load:
    """Part 4: what fits in addition to the promised tokens."""
    load, room = due.load, model.max_step_tokens
    for i in range(requests):
        if load.tokens >= room:
            break
        if counts[KIND, i] != BEST_EFFORT or counts[DECODING, i] == 0:
            continue
        wider = with_decode(load, float(counts[CONTEXT, i]))
        if step_s(wider, model) > due.cap_s + EPSILON_S:
            break
        grants[i], load = 1, wider
    for i in range(requests):
        if load.tokens >= room:
            break
        if counts[KIND, i] != BEST_EFFORT or counts[DECODING, i] == 1:
            continue
        start = counts[CONTEXT, i]
        c = tokens_within(due.cap_s, min(counts[PENDING, i], room - load.tokens), start, load, model)
        if c <= 0:
            break
        grants[i], load = c, with_chunk(load, start, c)
    return load


@compiled(error_model="numpy")
def commit(end_s: float, counts: N, times: F, requests: int, grants: N) -> None:
    """The step has ended: what reached its last token has got the next one, which is due a pace later."""
    for i in range(requests):
        if grants[i] == 0:
            continue
        counts[CONTEXT, i] += grants[i]
        counts[PENDING, i] -= grants[i]
        counts[PLACED, i] = 1
        if counts[PENDING, i] == 0:
            times[DUE_S, i] = next_due_s(times[DUE_S, i], end_s, times[TPOT_S, i], counts[DECODING, i])
            counts[PENDING, i] = 1
            counts[DECODING, i] = 1
            counts[LEFT, i] -= 1
