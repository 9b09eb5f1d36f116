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
"""

import numpy as np

from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import (
    BEST_EFFORT,
    CONTEXT,
    DECODING,
    DUE_S,
    EPSILON_S,
    KIND,
    LEFT,
    PENDING,
    PLACED,
    SLACK_PACES,
    TPOT_S,
    Columns,
    F,
    Load,
    N,
    StepModel,
    step_s,
    tokens_within,
    with_chunk,
    with_decode,
)
from penstock.services.domain.slo.compiled.promised import (
    PRESENT,
    DueStep,
    form_promised,
    promised_decodes,
    promised_prompts,
)


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
