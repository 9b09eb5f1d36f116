"""Replicas under SLOs in virtual time, compiled: arrivals, admission, hops between replicas, steps, best effort. No I/O.

Admission, certificate and steps are those of `services.domain.slo.compiled`. Requests that reach a replica during a step are
decided on together when it ends and take part from the next one on. A request that a replica declines goes to the next one,
up to a number of hops; then it is served as best effort where it came first, or declined. KV is counted in tokens.
"""

import numba
import numpy as np

from planner_service.simulator.attainment_kernel import Judgement, Slos, judge_token
from planner_service.simulator.drafts import best_window, standing, window_s
from planner_service.simulator.fleet_replica import (
    BEST_EFFORT_KV,
    BEST_EFFORT_RUNNING,
    COLUMNS,
    INBOX,
    PEAK,
    QUEUED,
    SIZES,
    WHOLE,
    FleetLimits,
    FleetOutcome,
    FleetReplica,
    FleetRequests,
    held_kv,
    make_room,
    preempt_last,
    queue_up,
    remove,
    reserved,
    start_best_effort,
)
from services.domain.slo.compiled.admission import MAX_CANDIDATES, decide
from services.domain.slo.compiled.certificate import certified
from services.domain.slo.compiled.layout import (
    BEST_EFFORT,
    CONTEXT,
    COUNTS,
    DECODING,
    DUE_S,
    EPSILON_S,
    GONE,
    KEPT_SHARE,
    KIND,
    LEFT,
    PENDING,
    RELEASE_S,
    STANDARD,
    TIMES,
    TPOT_S,
    F,
    N,
    StepModel,
)
from services.domain.slo.compiled.promised import NONE, PRESENT
from services.domain.slo.compiled.step import commit, form_batch, next_due_s, prompts_by_deadline

ADMITTED, SERVED_BEST_EFFORT, DECLINED = 1, 0, -1
GIVEN_UP = -1


@numba.njit(cache=True, nogil=True)
def serve_fleet(
    requests: FleetRequests,
    slos: Slos,
    tpots_s: F,  # (L) every pace among the requests, each once
    model: StepModel,
    replicas: int,
    limits: FleetLimits,
    judgement: Judgement,  # out
    out: FleetOutcome,
) -> int:
    """Serve R requests, each of which fits the KV alone. Returns the number of steps, or GIVEN_UP."""
    total, capacity = len(requests.arrival_s), limits.max_running
    counts, times = np.zeros((replicas, COUNTS, capacity), np.int64), np.zeros((replicas, TIMES, capacity))
    who = np.zeros((replicas, capacity), np.int64)
    inbox, queue = np.zeros((replicas, total), np.int64), np.zeros((replicas, total), np.int64)
    sizes = np.zeros((replicas, SIZES), np.int64)
    ready_s, reach_s = np.zeros(replicas), requests.arrival_s.copy()
    home, tried = np.zeros(total, np.int64), np.zeros(total, np.int64)
    memory = np.zeros(total, np.int64)
    order, grants, drafted = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
    kept_s = KEPT_SHARE * tpots_s
    arrived, steps, missed = 0, 0, 0
    while True:
        turn, turn_s = -1, np.inf
        for i in range(replicas):
            at_s = ready_s[i]
            if sizes[i, COLUMNS] == 0 and sizes[i, QUEUED] == 0:
                if sizes[i, INBOX] == 0:
                    continue
                at_s = max(at_s, reach_s[inbox[i, 0]])
            if at_s < turn_s:
                turn, turn_s = i, at_s
        if arrived < total and requests.arrival_s[arrived] <= turn_s:
            i = arrived % replicas
            if limits.least_loaded:
                least = np.inf
                for k in range(replicas):
                    i = (arrived + k) % replicas
                    load = _load(counts[i], sizes[i], inbox[i], requests)
                    if load < least:
                        least, home[arrived] = load, i
                i = home[arrived]
            home[arrived] = i
            inbox[i, sizes[i, INBOX]] = arrived
            sizes[i, INBOX] += 1
            arrived += 1
            continue
        if turn < 0:
            return steps
        one = FleetReplica(counts[turn], times[turn], who[turn], inbox[turn], queue[turn], sizes[turn])
        came = _came(one, reach_s, turn_s)
        if came > 0:
            left = _admit(turn_s, one, came, requests, slos, kept_s, memory, model, limits, out)
            # those left over go on to the next replica, or are served or declined where they came first
            for k in range(left):
                r = one.inbox[k]
                if tried[r] < min(limits.hops, replicas - 1) and slos.first_due_s[r] < np.inf:
                    tried[r] += 1
                    reach_s[r] = turn_s + limits.hop_s
                    to = (turn + 1) % replicas
                    _send(inbox[to], sizes[to], reach_s, r)
                elif slos.first_due_s[r] < np.inf and limits.decline:
                    out.outcome[r] = DECLINED
                    judgement.misses[r] += 1
                    missed += 1
                else:
                    missed += slos.first_due_s[r] < np.inf
                    out.outcome[r] = SERVED_BEST_EFFORT
                    out.replica[r] = home[r]
                    at = home[r]
                    if sizes[at, COLUMNS] == 0 and sizes[at, QUEUED] == 0:
                        ready_s[at] = max(ready_s[at], turn_s)
                    sizes[at, QUEUED] = queue_up(queue[at], sizes[at, QUEUED], r)
            for k in range(came, one.sizes[INBOX]):
                one.inbox[k - came] = one.inbox[k]
            one.sizes[INBOX] -= came
            for k in range(one.sizes[COLUMNS]):
                out.replica[one.who[k]] = turn
        if missed > limits.misses_allowed:
            return GIVEN_UP
        start_best_effort(one, requests, judgement, limits)
        make_room(one, memory, limits, out)
        n = one.sizes[COLUMNS]
        if n == 0:
            continue
        prompts = prompts_by_deadline(one.counts, one.times, n, order)
        left_over = np.int64(NONE)  # numba would compile `form_batch` once more for a constant; likewise below
        for i in range(n):
            if one.counts[KIND, i] == BEST_EFFORT:
                left_over = np.int64(PRESENT)
        took_s, _ = form_batch(
            turn_s, one.counts, one.times, n, order, prompts, model, left_over, np.bool_(False), grants
        )
        held = held_kv(one, grants, memory)
        if held > reserved(one.sizes):  # more than certified: take KV from best effort, and form the step again
            one.sizes[PEAK] = held
            if held + one.sizes[BEST_EFFORT_KV] + one.sizes[BEST_EFFORT_RUNNING] > limits.kv_tokens:
                continue
        end_s = turn_s + took_s
        if took_s == 0.0:  # nothing fits before the next request comes
            if one.sizes[INBOX] == 0 and arrived == total:
                raise RuntimeError("requests run, but no step has tokens for them")
            end_s = reach_s[one.inbox[0]] if one.sizes[INBOX] > 0 else requests.arrival_s[arrived]
        else:
            steps += 1
            if limits.drafts.max_window > 0:
                window, more_s = _window(turn_s, took_s, one, grants, memory, model, limits)
                end_s += more_s
                for i in range(n):
                    r = one.who[i]
                    drafted[i] = 0
                    if window > 0 and _drafts(one.counts, grants, i):
                        most = min(window, requests.output[r] - judgement.tokens[r] - 1)
                        drafted[i] = standing(r, judgement.tokens[r], most, limits.drafts.acceptance)
        ready_s[turn] = end_s
        missed += _end_step(end_s, one, grants, drafted, requests, slos, memory, judgement, out)


@numba.njit(cache=True, nogil=True)
def _drafts(counts: N, grants: N, i: int) -> bool:
    return bool(counts[KIND, i] == STANDARD and counts[DECODING, i] == 1 and grants[i] == 1)


@numba.njit(cache=True, nogil=True)
def _window(
    now_s: float, took_s: float, one: FleetReplica, grants: N, memory: N, model: StepModel, limits: FleetLimits
) -> tuple[int, float]:
    """How many tokens are drafted for each promised decode of the planned step, and by how much it takes longer.

    As a worker does (`worker_service.scheduling.slo_drafts`): no token of the step is late because of it, and the
    certificate, replayed from the later end as if no draft stood, still passes, with KV for all drafted tokens set aside.
    """
    n, tokens, decodes, context, due_s, lingering = one.sizes[COLUMNS], 0, 0, 0.0, np.inf, 0
    for i in range(n):
        tokens += grants[i]
        if _drafts(one.counts, grants, i):
            decodes += 1
            context += one.counts[CONTEXT, i] + 1.0
        if one.counts[KIND, i] == STANDARD:
            goes_on = 0 < grants[i] < one.counts[PENDING, i]
            due_s = due_s if goes_on else min(due_s, one.times[DUE_S, i])
        else:
            lingering += memory[one.who[i]]  # of promised requests without a pace
    if decodes == 0:
        return 0, 0.0
    kx, ky, context_s, pair_s = model.knot_tokens, model.knot_s, model.context_token_s, model.pair_s
    room = model.max_step_tokens - tokens
    window = best_window(took_s, tokens, decodes, context, room, kx, ky, context_s, pair_s, limits.drafts)
    release_s, peak = np.empty(n), np.empty(1)
    none, no_times = np.zeros((COUNTS, 0), np.int64), np.zeros((TIMES, 0))
    while window > 0:
        more_s = window_s(window, tokens, decodes, context, kx, ky, context_s, pair_s, limits.drafts)
        end_s = now_s + took_s + more_s
        if end_s <= due_s + EPSILON_S:
            counts, times = one.counts[:, :n].copy(), one.times[:, :n].copy()
            commit(end_s, counts, times, n, grants)
            for i in range(n):
                if counts[KIND, i] == STANDARD and counts[LEFT, i] <= 0:
                    counts[KIND, i] = GONE
            passes, _, _ = certified(
                end_s,
                counts,
                times,
                n,
                none,
                no_times,
                np.int64(0),
                model,
                np.bool_(True),
                np.bool_(False),
                release_s,
                float(limits.kv_tokens - lingering - window * decodes),
                np.int64(0),
                peak,
            )
            if passes:
                one.sizes[PEAK] = np.int64(peak[0]) + lingering + window * decodes
                return window, more_s
        window //= 2
    return 0, 0.0


@numba.njit(cache=True, nogil=True)
def _load(counts: N, sizes: N, inbox: N, requests: FleetRequests) -> float:
    """Prompt tokens that a replica has before it; of equals, the KV reserved decides."""
    tokens = 0.0
    for i in range(sizes[COLUMNS]):
        if counts[KIND, i] == STANDARD and counts[DECODING, i] == 0:
            tokens += counts[PENDING, i]
    for k in range(sizes[INBOX]):
        tokens += requests.prompt[inbox[k]]
    return tokens + reserved(sizes) * 1e-9


@numba.njit(cache=True, nogil=True)
def _came(one: FleetReplica, reach_s: F, now_s: float) -> int:
    """How many of the inbox are here by now; at most as many as are decided on together."""
    came = 0
    while came < one.sizes[INBOX] and came < MAX_CANDIDATES and reach_s[one.inbox[came]] <= now_s:
        came += 1
    return came


@numba.njit(cache=True, nogil=True)
def _send(inbox: N, sizes: N, reach_s: F, r: int) -> None:
    """Put a request into an inbox, by when it is there."""
    at = sizes[INBOX]
    while at > 0 and reach_s[inbox[at - 1]] > reach_s[r]:
        inbox[at] = inbox[at - 1]
        at -= 1
    inbox[at] = r
    sizes[INBOX] += 1


@numba.njit(cache=True, nogil=True)
def _admit(
    now_s: float,
    one: FleetReplica,
    came: int,
    requests: FleetRequests,
    slos: Slos,
    tpots_s: F,  # as kept
    memory: N,
    model: StepModel,
    limits: FleetLimits,
    out: FleetOutcome,
) -> int:
    """Decide on the first `came` of the inbox and start those admitted. Returns how many were not: the first of the inbox."""
    n, asking = one.sizes[COLUMNS], 0
    for k in range(came):
        asking += slos.first_due_s[one.inbox[k]] < np.inf
    new_counts, new_times = np.zeros((COUNTS, asking), np.int64), np.zeros((TIMES, asking))
    needs, value = np.zeros(asking, np.int64), np.ones(asking)
    accepted, release_s = np.zeros(asking, np.int64), np.zeros(n + asking)
    at = 0
    for k in range(came):
        r = one.inbox[k]
        if slos.first_due_s[r] < np.inf:
            new_counts[KIND, at], new_counts[PENDING, at] = STANDARD, requests.prompt[r]
            new_counts[LEFT, at] = requests.predicted[r]
            new_times[DUE_S, at], new_times[TPOT_S, at] = slos.first_due_s[r], KEPT_SHARE * requests.tightest_s[r]
            needs[at] = requests.prompt[r] + requests.predicted[r]
            value[at] = requests.value[r]
            at += 1
    if asking > 0:
        standard = n - one.sizes[BEST_EFFORT_RUNNING]
        lingering = 0  # of promised requests without a pace, whose promise is kept already
        for i in range(n):
            if one.counts[KIND, i] == BEST_EFFORT:
                lingering += memory[one.who[i]]
        peak = np.full(1, np.inf)
        decide(
            now_s,
            one.counts,
            one.times,
            n,
            new_counts,
            new_times,
            value,
            tpots_s,
            limits.max_running - standard,
            model,
            np.bool_(True),  # best effort may come at any time
            accepted,
            release_s,
            float(limits.kv_tokens - lingering),
            np.int64(0),
            peak,
        )
        if peak[0] < np.inf:
            one.sizes[PEAK] = np.int64(peak[0]) + lingering
        for i in range(n):
            one.times[RELEASE_S, i] = release_s[i]
    at, released, left = 0, n, 0
    for k in range(came):
        r = one.inbox[k]
        asks = slos.first_due_s[r] < np.inf
        if not asks or accepted[at] == 0:
            one.inbox[left] = r
            left += 1
        else:
            out.outcome[r] = ADMITTED
            memory[r] = needs[at]
            one.sizes[WHOLE] += needs[at]
            make_room(one, memory, limits, out)
            if one.sizes[COLUMNS] == limits.max_running:
                preempt_last(one, memory, out)
            n = one.sizes[COLUMNS]
            one.counts[:, n] = new_counts[:, at]
            one.times[:, n] = new_times[:, at]
            one.times[RELEASE_S, n] = release_s[released]
            one.who[n] = r
            one.sizes[COLUMNS] = n + 1
            released += 1
        at += asks
    return left


@numba.njit(cache=True, nogil=True)
def _end_step(
    end_s: float,
    one: FleetReplica,
    grants: N,
    drafted: N,  # tokens of each that stand besides
    requests: FleetRequests,
    slos: Slos,
    memory: N,
    judgement: Judgement,
    out: FleetOutcome,
) -> int:
    """Judge the tokens of a step that has ended and remove requests that have all of theirs; returns the new misses."""
    n, missed = one.sizes[COLUMNS], 0
    emits = np.zeros(n, np.int64)
    for i in range(n):
        emits[i] = grants[i] > 0 and grants[i] == one.counts[PENDING, i]
    commit(end_s, one.counts, one.times, n, grants)
    for i in range(n):
        one.counts[CONTEXT, i] += drafted[i]
        one.counts[LEFT, i] -= drafted[i]
        for _ in range(drafted[i]):
            one.times[DUE_S, i] = next_due_s(one.times[DUE_S, i], end_s, one.times[TPOT_S, i], 1)
    i = 0
    for k in range(n):
        r = one.who[i]
        if emits[k]:
            first = judgement.tokens[r] == 0
            before = judgement.misses[r]
            for _ in range(1 + drafted[k]):
                judge_token(r, end_s, judgement.tokens[r] + 1 == requests.output[r], slos, judgement)
            missed += before == 0 and judgement.misses[r] > 0 and out.outcome[r] == ADMITTED
            if first:
                out.first_s[r] = end_s
            one.counts[LEFT, i] = max(1, one.counts[LEFT, i])  # it may outlive its prediction
            held = requests.prompt[r] + judgement.tokens[r]
            if memory[r] == 0:
                one.sizes[BEST_EFFORT_KV] += 1
            elif held > memory[r]:
                one.sizes[WHOLE] += held - memory[r]
                memory[r] = held
            if judgement.tokens[r] == requests.output[r]:
                out.finish_s[r] = end_s
                if memory[r] > 0:
                    one.sizes[WHOLE] -= memory[r]
                    memory[r] = 0
                else:
                    one.sizes[BEST_EFFORT_KV] -= held
                    one.sizes[BEST_EFFORT_RUNNING] -= 1
                remove(one, i)
                continue
        i += 1
    return missed
