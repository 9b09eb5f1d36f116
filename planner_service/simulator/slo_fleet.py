"""Replicas under SLOs in virtual time, compiled: arrivals, admission, hops between replicas, steps, best effort. No I/O.

Admission, certificate and steps are those of `services.domain.slo.compiled`. Requests that reach a replica during a step are
decided on together when it ends and take part from the next one on. A request that a replica declines goes to the next one,
up to a number of hops; then it is served as best effort where it came first, or declined. KV is counted in tokens.
"""

from typing import NamedTuple

import numba
import numpy as np

from planner_service.simulator.attainment_kernel import Judgement, Slos, judge_token
from services.domain.slo.compiled.admission import MAX_CANDIDATES, decide
from services.domain.slo.compiled.layout import (
    BEST_EFFORT,
    CONTEXT,
    COUNTS,
    DECODING,
    DUE_S,
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
from services.domain.slo.compiled.step import NONE, PRESENT, commit, form_batch, prompts_by_deadline

ADMITTED, SERVED_BEST_EFFORT, DECLINED = 1, 0, -1
GIVEN_UP = -1


class FleetRequests(NamedTuple):
    """R requests in order of arrival, (R) each.

    predicted: output tokens that admission counts with; where it is `output`, lengths are known. tightest_s: the pace that
    is scheduled, the tightest of its phases; infinite for none. A request with an infinite first_due_s in the Slos asks for
    best effort. value: what attaining its SLO is worth.
    """

    arrival_s: F
    prompt: N
    output: N
    predicted: N
    tightest_s: F
    value: F


class FleetLimits(NamedTuple):
    """kv_tokens, max_running: of each replica. hops: replicas that are tried behind the first. hop_s: until the next one
    has the request. decline: requests that no replica admits end; otherwise they are served as best effort. least_loaded: the
    first choice is the replica with the fewest prompt tokens before it, else they take turns.
    misses_allowed: the simulation is given up once more requests missed.
    """

    kv_tokens: int
    max_running: int
    hops: int
    hop_s: float
    decline: bool
    least_loaded: bool
    misses_allowed: int


class FleetOutcome(NamedTuple):
    """What R requests received, (R) each: when the first and the last token came (0 for those declined), ADMITTED,
    SERVED_BEST_EFFORT or DECLINED, by which replica, how often they were preempted."""

    first_s: F
    finish_s: F
    outcome: N
    replica: N
    preemptions: N


class _Replica(NamedTuple):
    """One replica: its columns, and its queues of requests. memory (R): KV tokens of a promised request when it has all its
    tokens, 0 for others.

    sizes: see below. reach_s (R): when a request reaches the replica that it was sent to.
    """

    counts: N
    times: F
    who: N
    inbox: N
    queue: N
    sizes: N


# sizes of a replica
# _WHOLE: KV of all promised requests when each has all its tokens; _PEAK: what they hold at most at any time, by certificate
_COLUMNS, _INBOX, _QUEUED, _WHOLE, _PEAK, _BEST_EFFORT_KV, _BEST_EFFORT_RUNNING = range(7)
_SIZES = 7


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
    sizes = np.zeros((replicas, _SIZES), np.int64)
    ready_s, reach_s = np.zeros(replicas), requests.arrival_s.copy()
    home, tried = np.zeros(total, np.int64), np.zeros(total, np.int64)
    memory = np.zeros(total, np.int64)
    order, grants = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
    kept_s = KEPT_SHARE * tpots_s
    arrived, steps, missed = 0, 0, 0
    while True:
        turn, turn_s = -1, np.inf
        for i in range(replicas):
            at_s = ready_s[i]
            if sizes[i, _COLUMNS] == 0 and sizes[i, _QUEUED] == 0:
                if sizes[i, _INBOX] == 0:
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
            inbox[i, sizes[i, _INBOX]] = arrived
            sizes[i, _INBOX] += 1
            arrived += 1
            continue
        if turn < 0:
            return steps
        one = _Replica(counts[turn], times[turn], who[turn], inbox[turn], queue[turn], sizes[turn])
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
                    if sizes[at, _COLUMNS] == 0 and sizes[at, _QUEUED] == 0:
                        ready_s[at] = max(ready_s[at], turn_s)
                    sizes[at, _QUEUED] = _queue(queue[at], sizes[at, _QUEUED], r)
            for k in range(came, one.sizes[_INBOX]):
                one.inbox[k - came] = one.inbox[k]
            one.sizes[_INBOX] -= came
            for k in range(one.sizes[_COLUMNS]):
                out.replica[one.who[k]] = turn
        if missed > limits.misses_allowed:
            return GIVEN_UP
        _start_best_effort(one, requests, judgement, limits)
        _make_room(one, memory, limits, out)
        n = one.sizes[_COLUMNS]
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
        held = _held(one, grants, memory)
        if held > _reserved(one.sizes):  # more than certified: take KV from best effort, and form the step again
            one.sizes[_PEAK] = held
            if held + one.sizes[_BEST_EFFORT_KV] + one.sizes[_BEST_EFFORT_RUNNING] > limits.kv_tokens:
                continue
        end_s = turn_s + took_s
        if took_s == 0.0:  # nothing fits before the next request comes
            if one.sizes[_INBOX] == 0 and arrived == total:
                raise RuntimeError("requests run, but no step has tokens for them")
            end_s = reach_s[one.inbox[0]] if one.sizes[_INBOX] > 0 else requests.arrival_s[arrived]
        else:
            steps += 1
        ready_s[turn] = end_s
        missed += _end_step(end_s, one, grants, requests, slos, memory, judgement, out)


@numba.njit(cache=True, nogil=True)
def _reserved(sizes: N) -> int:
    """KV tokens that promised requests hold at most, now or later."""
    return min(sizes[_WHOLE], sizes[_PEAK])


@numba.njit(cache=True, nogil=True)
def _held(one: _Replica, grants: N, memory: N) -> int:
    """KV tokens that promised requests hold at the end of a step with these tokens, prompts counted as a whole."""
    held = 0
    for i in range(one.sizes[_COLUMNS]):
        if memory[one.who[i]] > 0:
            held += one.counts[CONTEXT, i] + (grants[i] if one.counts[DECODING, i] == 1 else one.counts[PENDING, i])
    return held


@numba.njit(cache=True, nogil=True)
def _load(counts: N, sizes: N, inbox: N, requests: FleetRequests) -> float:
    """Prompt tokens that a replica has before it; of equals, the KV reserved decides."""
    tokens = 0.0
    for i in range(sizes[_COLUMNS]):
        if counts[KIND, i] == STANDARD and counts[DECODING, i] == 0:
            tokens += counts[PENDING, i]
    for k in range(sizes[_INBOX]):
        tokens += requests.prompt[inbox[k]]
    return tokens + _reserved(sizes) * 1e-9


@numba.njit(cache=True, nogil=True)
def _came(one: _Replica, reach_s: F, now_s: float) -> int:
    """How many of the inbox are here by now; at most as many as are decided on together."""
    came = 0
    while came < one.sizes[_INBOX] and came < MAX_CANDIDATES and reach_s[one.inbox[came]] <= now_s:
        came += 1
    return came


@numba.njit(cache=True, nogil=True)
def _send(inbox: N, sizes: N, reach_s: F, r: int) -> None:
    """Put a request into an inbox, by when it is there."""
    at = sizes[_INBOX]
    while at > 0 and reach_s[inbox[at - 1]] > reach_s[r]:
        inbox[at] = inbox[at - 1]
        at -= 1
    inbox[at] = r
    sizes[_INBOX] += 1


@numba.njit(cache=True, nogil=True)
def _admit(
    now_s: float,
    one: _Replica,
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
    n, asking = one.sizes[_COLUMNS], 0
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
        standard = n - one.sizes[_BEST_EFFORT_RUNNING]
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
            one.sizes[_PEAK] = np.int64(peak[0]) + lingering
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
            one.sizes[_WHOLE] += needs[at]
            _make_room(one, memory, limits, out)
            if one.sizes[_COLUMNS] == limits.max_running:
                _preempt_last(one, memory, out)
            n = one.sizes[_COLUMNS]
            one.counts[:, n] = new_counts[:, at]
            one.times[:, n] = new_times[:, at]
            one.times[RELEASE_S, n] = release_s[released]
            one.who[n] = r
            one.sizes[_COLUMNS] = n + 1
            released += 1
        at += asks
    return left


@numba.njit(cache=True, nogil=True)
def _start_best_effort(one: _Replica, requests: FleetRequests, judgement: Judgement, limits: FleetLimits) -> None:
    """Start those queued for whom all their tokens and the next one have room, by arrival."""
    while one.sizes[_QUEUED] > 0 and one.sizes[_COLUMNS] < limits.max_running:
        r, n = one.queue[0], one.sizes[_COLUMNS]
        needs = requests.prompt[r] + judgement.tokens[r]
        held = _reserved(one.sizes) + one.sizes[_BEST_EFFORT_KV] + one.sizes[_BEST_EFFORT_RUNNING]
        if held + needs + 1 > limits.kv_tokens:
            return
        one.counts[KIND, n], one.counts[DECODING, n], one.counts[CONTEXT, n] = BEST_EFFORT, 0, 0
        one.counts[PENDING, n], one.counts[LEFT, n] = needs, requests.output[r] - judgement.tokens[r]
        one.times[DUE_S, n], one.times[TPOT_S, n], one.times[RELEASE_S, n] = np.inf, np.inf, -np.inf
        one.who[n] = r
        one.sizes[_COLUMNS] = n + 1
        one.sizes[_BEST_EFFORT_KV] += needs
        one.sizes[_BEST_EFFORT_RUNNING] += 1
        for k in range(1, one.sizes[_QUEUED]):
            one.queue[k - 1] = one.queue[k]
        one.sizes[_QUEUED] -= 1


@numba.njit(cache=True, nogil=True)
def _make_room(one: _Replica, memory: N, limits: FleetLimits, out: FleetOutcome) -> None:
    """Preempt until reserved KV, best effort's and a token for each of its decodes have room."""
    while _reserved(one.sizes) + one.sizes[_BEST_EFFORT_KV] + one.sizes[_BEST_EFFORT_RUNNING] > limits.kv_tokens:
        _preempt_last(one, memory, out)


@numba.njit(cache=True, nogil=True)
def _preempt_last(one: _Replica, memory: N, out: FleetOutcome) -> None:
    """Queue the best-effort request started last again; where there is none, the promised request started last."""
    i = one.sizes[_COLUMNS] - 1
    while i >= 0 and memory[one.who[i]] > 0:
        i -= 1
    if i < 0:
        i = one.sizes[_COLUMNS] - 1
    r = one.who[i]
    if memory[r] > 0:
        one.sizes[_WHOLE] -= memory[r]
        memory[r] = 0
    else:
        one.sizes[_BEST_EFFORT_KV] -= one.counts[CONTEXT, i] + one.counts[PENDING, i]
        one.sizes[_BEST_EFFORT_RUNNING] -= 1
    one.sizes[_QUEUED] = _queue(one.queue, one.sizes[_QUEUED], r)
    out.preemptions[r] += 1
    _remove(one, i)


@numba.njit(cache=True, nogil=True)
def _end_step(
    end_s: float,
    one: _Replica,
    grants: N,
    requests: FleetRequests,
    slos: Slos,
    memory: N,
    judgement: Judgement,
    out: FleetOutcome,
) -> int:
    """Judge the tokens of a step that has ended and remove requests that have all of theirs; returns the new misses."""
    n, missed = one.sizes[_COLUMNS], 0
    emits = np.zeros(n, np.int64)
    for i in range(n):
        emits[i] = grants[i] > 0 and grants[i] == one.counts[PENDING, i]
    commit(end_s, one.counts, one.times, n, grants)
    i = 0
    for k in range(n):
        r = one.who[i]
        if emits[k]:
            first = judgement.tokens[r] == 0
            before = judgement.misses[r]
            judge_token(r, end_s, judgement.tokens[r] + 1 == requests.output[r], slos, judgement)
            missed += before == 0 and judgement.misses[r] > 0 and out.outcome[r] == ADMITTED
            if first:
                out.first_s[r] = end_s
            one.counts[LEFT, i] = max(1, one.counts[LEFT, i])  # it may outlive its prediction
            held = requests.prompt[r] + judgement.tokens[r]
            if memory[r] == 0:
                one.sizes[_BEST_EFFORT_KV] += 1
            elif held > memory[r]:
                one.sizes[_WHOLE] += held - memory[r]
                memory[r] = held
            if judgement.tokens[r] == requests.output[r]:
                out.finish_s[r] = end_s
                if memory[r] > 0:
                    one.sizes[_WHOLE] -= memory[r]
                    memory[r] = 0
                else:
                    one.sizes[_BEST_EFFORT_KV] -= held
                    one.sizes[_BEST_EFFORT_RUNNING] -= 1
                _remove(one, i)
                continue
        i += 1
    return missed


@numba.njit(cache=True, nogil=True)
def _queue(queue: N, queued: int, r: int) -> int:
    """By arrival, so that those preempted keep their place; returns how many are queued."""
    at = queued
    while at > 0 and queue[at - 1] > r:
        queue[at] = queue[at - 1]
        at -= 1
    queue[at] = r
    return queued + 1


@numba.njit(cache=True, nogil=True)
def _remove(one: _Replica, i: int) -> None:
    """Take column i out, order kept."""
    for k in range(i + 1, one.sizes[_COLUMNS]):
        for row in range(COUNTS):
            one.counts[row, k - 1] = one.counts[row, k]
        for row in range(TIMES):
            one.times[row, k - 1] = one.times[row, k]
        one.who[k - 1] = one.who[k]
    one.sizes[_COLUMNS] -= 1
