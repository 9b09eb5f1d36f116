"""Admission: the dynamic program of SLOs-Serve, section 3.2.1, compiled, followed by the certificate. No I/O.

The recurrence takes the best over the last accepted request j before i. As the budget grows at a rate that depends on the
counts alone, PB*(a + b, n) = PB*(a, n) + PB*(b, n), and all states can be carried along to each deadline in turn: a state is
then extended by the request there or left as it is. All requests are worth the same, the request-throughput form of
appendix C. States of equal counts n are kept only where none has at least as much budget with at most as much memory. Where
memory cannot bind, that is one state per n, `pb[i, n]`, at its cost.
"""

from typing import NamedTuple

import numpy as np

from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.layout import (
    CONTEXT,
    DECODING,
    DUE_S,
    KIND,
    PENDING,
    STANDARD,
    TPOT_S,
    Certificate,
    F,
    Load,
    N,
    StepModel,
    base_s,
    tokens_within,
)
from penstock.services.domain.slo.compiled.replay import AdmissionQuestion, certified, count_bits

MAX_CANDIDATES = 60
"""Decided together: their sets are bits of one word. More are decided in the next round."""
MAX_STATES = 4_096
"""Kept at one deadline. Beyond, the states result last are dropped: the answer stays sound and may not be the best."""
MAX_CERTIFICATES = 16
"""Replays with best effort that one decision may take."""
TOLERANCE_TOKENS = 1e-6
UNLIMITED_TOKENS = 2.0**60
SKIPPED_SHARE = 8
"""Where a set of n requests is late, the next one tried has n / SKIPPED_SHARE fewer, at least one. Those left out are then
tried one by one. Where it runs out of KV or places, which the program hardly foresees, sets are tried by halving."""


@compiled(error_model="numpy")
def budget_per_s(counts: N, tpots_s: F, context_tokens: float, model: StepModel) -> float:
    """BudgetModel.tokens_per_s: (L) counts, (L) paces."""
    step_s = np.inf
    for tier in range(len(tpots_s)):
        if counts[tier] > 0:
            step_s = min(step_s, tpots_s[tier])
    step_s = min(step_s, base_s(model.max_step_tokens, model) / (1.0 - model.reserve))
    decodes = 0.0
    for tier in range(len(tpots_s)):
        decodes += counts[tier] * step_s / tpots_s[tier]
    one = Load(1, float(round(context_tokens * decodes)), 0.0, 0, 0.0, 0.0)
    fitting = tokens_within((1.0 - model.reserve) * step_s, model.max_step_tokens - 1, 0, one, model)
    return (fitting + 1 - decodes) / step_s


class Entries(NamedTuple):
    """What the program goes through, (E) each: prompts by deadline, ties by arrival, those committed before candidates.

    due_s: from now. tokens: of the prompt, to compute. tier: index of the pace. memory: tokens of KV. candidate: its number,
    -1 for a prompt that is committed.
    """

    due_s: F
    tokens: N
    tier: N
    memory: N
    candidate: N


class Budget(NamedTuple):
    """tpots_s: (L) paces. decoding: (L) running decodes. rates: by state, tokens per second (NaN: not computed yet), where
    state = sum over tiers of stride[tier] * prompts accepted."""

    tpots_s: F
    decoding: N
    context_tokens: float
    model: StepModel
    stride: N
    rates: F


class Sets(NamedTuple):
    """By count of accepted candidates, (C + 1): the budget that the best set leaves, -inf where there is no set; its bits."""

    left: F
    bits: N


class States(NamedTuple):
    """States of the program, (MAX_STATES): budget left, memory used, counts n as a number, accepted candidates."""

    left: F
    used: N
    at: N
    bits: N


@compiled(error_model="numpy")
def best_sets(
    entries: Entries,
    tpots_s: F,
    decoding: N,
    context_tokens: float,
    free_memory: int,
    model: StepModel,
    result: Sets,  # out
) -> bool:
    """The dynamic program. False where those committed do not fit by themselves.

    With the states S(e) before entry e, each a (budget b, memory m, counts n), the recurrence goes

        S(e + 1) = { (b', m, n) } + { (b' - p_e, m + m_e, n + 1 at tier of e) : b' - p_e >= 0, rate(n + 1) >= 0 }

    over all states, with b' = b + (due_e - due_{e-1}) rate(n); the first part only if e is a candidate.
    """
    tiers, new_memory = len(tpots_s), 0
    stride = np.ones(tiers + 1, np.int64)
    for t in range(tiers):
        stride[t + 1] = stride[t] * (1 + np.sum(entries.tier == t))
    rates = np.full(stride[tiers], np.nan)
    budget = Budget(tpots_s, decoding, context_tokens, model, stride, rates)
    for e in range(len(entries.due_s)):
        if entries.candidate[e] >= 0:
            new_memory += entries.memory[e]
    binding = new_memory > free_memory
    states, following = _new_states(), _new_states()
    head, after = np.empty(stride[tiers], np.int64), np.empty(MAX_STATES, np.int64)
    count, time_s = 1, 0.0
    if _rate(0, budget) < 0:
        return False
    for e in range(len(entries.due_s)):
        passed_s = max(0.0, entries.due_s[e] - time_s)
        time_s = max(time_s, entries.due_s[e])
        forced = entries.candidate[e] < 0
        head[:] = -1
        stored = 0
        for take in range(1 if forced else 0, 2):  # those without it first: of equals, who came first is accepted
            for s in range(count):
                at, bits, used = states.at[s], states.bits[s], states.used[s]
                left = states.left[s] + passed_s * _rate(at, budget)
                if take == 1:
                    left -= entries.tokens[e]
                    at += stride[entries.tier[e]]
                    if left < -TOLERANCE_TOKENS or _rate(at, budget) < 0:
                        continue
                    if not forced:
                        bits |= np.int64(1) << entries.candidate[e]
                        used += entries.memory[e] if binding else 0
                        if used > free_memory:
                            continue
                if stored == MAX_STATES or _is_beaten(left, used, at, following, head, after):
                    continue
                following.left[stored], following.used[stored] = left, used
                following.at[stored], following.bits[stored] = at, bits
                after[stored] = head[at]
                head[at] = stored
                stored += 1
        count = _without_beaten(following, stored, states)
        if count == 0:
            return False
    result.left[:] = -np.inf
    for s in range(count):
        c = count_bits(states.bits[s])
        if states.left[s] > result.left[c]:
            result.left[c], result.bits[c] = states.left[s], states.bits[s]
    return True


@compiled(error_model="numpy")
def _new_states() -> States:
    whole = np.zeros((3, MAX_STATES), np.int64)
    return States(np.zeros(MAX_STATES), whole[0], whole[1], whole[2])


@compiled(error_model="numpy")
def _is_beaten(left: float, used: int, at: int, states: States, head: N, after: N) -> bool:
    """Whether another state of the same counts is at least as good in everything; takes those out that this one beats."""
    k, before = head[at], -1
    while k >= 0:
        if states.left[k] >= left and states.used[k] <= used:
            return True
        following = after[k]
        if left >= states.left[k] and used <= states.used[k]:
            states.at[k] = -1  # out
            if before < 0:
                head[at] = following
            else:
                after[before] = following
        else:
            before = k
        k = following
    return False


@compiled(error_model="numpy")
def _without_beaten(states: States, stored: int, to: States) -> int:
    """Copy the states that are not beaten; how many they are."""
    count = 0
    for k in range(stored):
        if states.at[k] >= 0:
            to.left[count], to.used[count] = states.left[k], states.used[k]
            to.at[count], to.bits[count] = states.at[k], states.bits[k]
            count += 1
    return count


@compiled(error_model="numpy")
def decide(
    question: AdmissionQuestion,  # with at most MAX_CANDIDATES
    tpots_s: F,  # (L) paces, ascending; the first is the tightest of the requests
    accepted: N,  # (C) out: 1 or 0
    result: Certificate,  # out: of the running requests, and after them of those accepted
) -> int:
    """Decide which candidates are admitted; returns how many replays that took.

    The best set of each count is tried, the largest first, until one passes its certificate: first with prompts that complete
    as early as they can, then, should that break a promise, with prompts that complete as late as they may. Then each
    candidate left out is tried once together with those accepted, the shortest prompt first: the program takes every decode
    to last without limit, the replay knows when it will end.

    KV and places are checked over time. The program only rules out sets whose prompts do not fit next to the KV that is held
    now; the certificate follows what every request holds from step to step. Where nothing passes, not even
    the running requests alone, `result` stays as it is.
    """
    candidates, tries, chosen = question.new.counts.shape[1], 0, np.int64(0)
    accepted[:] = 0
    sets = Sets(np.full(candidates + 1, -np.inf), np.zeros(candidates + 1, np.int64))
    _sets_by_program(question, tpots_s, sets)
    low, high, most, halving = 0, candidates + 1, candidates, False
    while tries < MAX_CERTIFICATES:
        best: int = most
        while best > low and sets.left[best] == -np.inf:
            best -= 1
        if best <= low:
            break
        passed, took, short = certified(question, sets.bits[best], result)
        tries += took
        halving |= short
        if passed:
            chosen, low = sets.bits[best], best
            if not halving:
                break
        else:
            high = best
        most = (low + high) // 2 if halving else best - max(1, best // SKIPPED_SHARE)
    if chosen == 0:  # no candidate fits in addition to running requests that are late already
        passed, took, _ = certified(question, chosen, result)
        tries += took
        if not passed:
            return tries
    for c in np.argsort(question.new.counts[PENDING], kind="mergesort"):
        if tries >= MAX_CERTIFICATES:
            break
        if chosen >> c & 1:
            continue
        wider = chosen | np.int64(1) << c
        passed, took, _ = certified(question, wider, result)
        tries += took
        if passed:
            chosen = wider
    for c in range(candidates):
        accepted[c] = chosen >> c & 1
    return tries


@compiled(error_model="numpy")
def _sets_by_program(question: AdmissionQuestion, tpots_s: F, sets: Sets) -> None:
    """The sets of `best_sets` for the running requests and the candidates."""
    candidates = question.new.counts.shape[1]
    most, count, contexts, requests = question.requests + candidates, 0, 0, 0
    entries = Entries(
        np.empty(most),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
    )
    decoding = np.zeros(len(tpots_s), np.int64)
    free_memory = min(question.kv.tokens, UNLIMITED_TOKENS)
    for i in range(most):
        c = i - question.requests
        of, column = (question.running, i) if c < 0 else (question.new, c)
        if of.counts[KIND, column] != STANDARD:
            continue
        length = of.counts[CONTEXT, column] + of.counts[PENDING, column]
        contexts += length
        requests += 1
        free_memory -= 0 if c >= 0 else length + question.kv.partial_tokens
        pace = _tier(of.times[TPOT_S, column], tpots_s)
        if c < 0 and of.counts[DECODING, column] == 1:
            decoding[pace] += 1
            continue
        entries.due_s[count] = of.times[DUE_S, column] - question.now_s
        entries.tokens[count], entries.tier[count] = of.counts[PENDING, column], pace
        entries.memory[count] = 0 if c < 0 else length + question.kv.partial_tokens
        entries.candidate[count] = max(-1, c)
        count += 1
    order = np.argsort(entries.due_s[:count], kind="mergesort")  # ties as they come
    best_sets(
        Entries(
            entries.due_s[order],
            entries.tokens[order],
            entries.tier[order],
            entries.memory[order],
            entries.candidate[order],
        ),
        tpots_s,
        decoding,
        contexts / max(1, requests),
        int(max(0.0, free_memory)),
        question.model,
        sets,
    )


@compiled(error_model="numpy")
def _rate(at: int, budget: Budget) -> float:
    """The budget per second with the counts of state `at`."""
    if np.isnan(budget.rates[at]):
        n, stride = budget.decoding.copy(), budget.stride
        for t in range(len(n)):
            n[t] += at // stride[t] % (stride[t + 1] // stride[t])
        budget.rates[at] = budget_per_s(n, budget.tpots_s, budget.context_tokens, budget.model)
    return budget.rates[at]


@compiled(error_model="numpy")
def _tier(tpot_s: float, tpots_s: F) -> int:
    """The greatest pace that is not looser than this one: its own, or a tighter one in its place."""
    tier = 0
    for t in range(len(tpots_s)):
        if tpots_s[t] <= tpot_s:
            tier = t
    return tier
