"""Replicas under SLOs in virtual time, compiled: arrivals, admission, hops between replicas, steps, best effort. No I/O.

Admission, certificate and steps are those of `services.domain.slo.compiled`. Requests that reach a replica during a step are
decided on together when it ends and take part from the next one on. A request that a replica declines goes to the next one,
up to a number of hops; then it is served as best effort where it came first. KV is counted in tokens.
"""

from typing import NamedTuple

import numpy as np

from penstock.planner_service.simulator.attainment_kernel import judge_token
from penstock.planner_service.simulator.fleet_replica import (
    BEST_EFFORT_KV,
    BEST_EFFORT_RUNNING,
    COLUMNS,
    INBOX,
    QUEUED,
    SIZES,
    WHOLE,
    FleetReplica,
    FleetRequests,
    Run,
    kv_held,
    make_room,
    over_kv,
    places_of,
    preempt_last,
    queue_up,
    remove,
    start_best_effort,
)
from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.admission import MAX_CANDIDATES, decide
from penstock.services.domain.slo.compiled.certified_step import (
    ALONE,
    AT_S,
    MOST_HELD,
    PATHS,
    STATES,
    certified_step,
    may_end_s,
)
from penstock.services.domain.slo.compiled.layout import (
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
    Certificate,
    Columns,
    F,
    Kv,
    N,
)
from penstock.services.domain.slo.compiled.replay import AdmissionQuestion
from penstock.services.domain.slo.compiled.step import commit

HOP_S = 0.001  # until the next replica has a request that one has declined


class Fleet(NamedTuple):
    """F replicas with R requests. each: the arrays of FleetReplica with one more axis, the first. ready_s (F): when the step
    of each ends.

    Of each request, (R): reach_s, when it is at the replica that it goes to; home, where it came first; tried, how many
    others; memory, KV tokens of one under a promise when it has all its tokens, 0 for others.
    """

    each: FleetReplica
    ready_s: F
    reach_s: F
    home: N
    tried: N
    memory: N


@compiled()
def serve_fleet(run: Run, replicas: int) -> None:
    """Serve R requests, each of which fits the KV alone."""
    requests, model, limits, out, total = run.requests, run.model, run.limits, run.out, len(run.requests.arrival_s)
    columns = Columns(np.zeros((replicas, COUNTS, total), np.int64), np.zeros((replicas, TIMES, total)))
    rows, of_requests = np.zeros((3, replicas, total), np.int64), np.zeros((3, total), np.int64)
    sizes, certified = np.zeros((replicas, SIZES), np.int64), np.zeros((replicas, STATES))
    each = FleetReplica(columns, rows[0], rows[1], rows[2], sizes, certified)
    reach_s = requests.arrival_s.copy()
    fleet = Fleet(each, np.zeros(replicas), reach_s, of_requests[0], of_requests[1], of_requests[2])
    grants, no_drafts = np.zeros(total, np.int64), np.zeros(total, np.int64)
    kv, arrived, steps = Kv(float(limits.kv_tokens), 0), 0, 0
    while True:
        turn, turn_s = _next_turn(fleet)
        if arrived < total and requests.arrival_s[arrived] <= turn_s:
            _arrive(arrived, fleet, requests)
            arrived += 1
            continue
        if turn < 0:
            return
        one = _replica(fleet, turn)
        came = _came(one, fleet.reach_s, turn_s)
        if came > 0:
            _decide(turn, turn_s, came, one, fleet, run)
        start_best_effort(one, run)
        make_room(one, fleet.memory, run)
        if one.sizes[COLUMNS] == 0:
            continue
        took_s = _form_step(turn_s, one, fleet.memory, grants, kv, run)
        if took_s < 0.0:
            continue
        end_s = turn_s + took_s * limits.took[steps % len(limits.took)]
        if took_s == 0.0:  # nothing fits before the next request comes
            if one.sizes[INBOX] == 0 and arrived == total:
                raise RuntimeError("requests run, but no step has tokens for them")
            end_s = fleet.reach_s[one.inbox[0]] if one.sizes[INBOX] > 0 else requests.arrival_s[arrived]
        else:
            steps += 1
            end_s = may_end_s(end_s, one.columns, one.sizes[COLUMNS], model, kv, one.certified, grants, no_drafts)
        fleet.ready_s[turn] = end_s
        out.most_kv[turn] = max(out.most_kv[turn], kv_held(one.columns, one.sizes[COLUMNS], grants))
        _end_step(end_s, one, grants, fleet.memory, run)


@compiled()
def _replica(fleet: Fleet, i: int) -> FleetReplica:
    each = fleet.each
    columns = Columns(each.columns.counts[i], each.columns.times[i])
    return FleetReplica(columns, each.who[i], each.inbox[i], each.queue[i], each.sizes[i], each.certified[i])


@compiled(allocates=False)
def _next_turn(fleet: Fleet) -> tuple[int, float]:
    """The replica that can take a step first, and when; -1 where none has anything to do."""
    turn, turn_s = -1, np.inf
    for i in range(len(fleet.ready_s)):
        at_s, sizes = fleet.ready_s[i], fleet.each.sizes[i]
        if sizes[COLUMNS] == 0 and sizes[QUEUED] == 0:
            if sizes[INBOX] == 0:
                continue
            at_s = max(at_s, fleet.reach_s[fleet.each.inbox[i, 0]])
        if at_s < turn_s:
            turn, turn_s = i, at_s
    return turn, turn_s


@compiled(allocates=False)
def _arrive(r: int, fleet: Fleet, requests: FleetRequests) -> None:
    """A request goes to the replica with the least load first; of equals, by turns."""
    replicas = len(fleet.ready_s)
    home, least = r % replicas, np.inf
    for k in range(replicas):
        i = (r + k) % replicas
        load = _load(i, fleet, requests)
        if load < least:
            least, home = load, i
    fleet.home[r] = home
    fleet.each.inbox[home, fleet.each.sizes[home, INBOX]] = r
    fleet.each.sizes[home, INBOX] += 1


@compiled()
def _decide(turn: int, now_s: float, came: int, one: FleetReplica, fleet: Fleet, run: Run) -> None:
    """Decide on the `came` that have come to a replica.

    Those declined move to the next replica, or are served as best effort where they came first.
    """
    replicas = len(fleet.ready_s)
    for k in range(_admit(now_s, one, came, fleet.memory, run)):
        r = one.inbox[k]
        asks = run.slos.first_due_s[r] < np.inf
        if asks and fleet.tried[r] < min(run.limits.hops, replicas - 1):
            fleet.tried[r] += 1
            fleet.reach_s[r] = now_s + HOP_S
            to = (turn + 1) % replicas
            _send(fleet.each.inbox[to], fleet.each.sizes[to], fleet.reach_s, r)
        else:
            home = fleet.home[r]
            sizes = fleet.each.sizes[home]
            if sizes[COLUMNS] == 0 and sizes[QUEUED] == 0:
                fleet.ready_s[home] = max(fleet.ready_s[home], now_s)
            sizes[QUEUED] = queue_up(fleet.each.queue[home], sizes[QUEUED], r)
    for k in range(came, one.sizes[INBOX]):
        one.inbox[k - came] = one.inbox[k]
    one.sizes[INBOX] -= came


@compiled()
def _form_step(now_s: float, one: FleetReplica, memory: N, grants: N, kv: Kv, run: Run) -> float:
    """Decide the tokens of the next step; the seconds it takes, or -1 where it has to be formed again.

    It has, where it takes more KV or places than are certified: best effort gives way first.
    """
    paths, at_s = one.certified[PATHS], one.certified[AT_S]
    took_s = certified_step(now_s, one.columns, one.sizes[COLUMNS], run.model, kv, one.certified, grants)
    over = over_kv(one, run.limits)
    if not over and places_of(one, grants) <= run.model.places:
        return took_s
    if not over:
        preempt_last(one, memory, run.out)
    one.certified[PATHS], one.certified[AT_S] = paths, at_s
    return -1.0


@compiled(allocates=False)
def _load(replica: int, fleet: Fleet, requests: FleetRequests) -> float:
    """Prompt tokens that a replica has before it; of equals, the KV reserved decides."""
    each = fleet.each
    tokens, counts, sizes = 0.0, each.columns.counts[replica], each.sizes[replica]
    for i in range(sizes[COLUMNS]):
        if counts[KIND, i] == STANDARD and counts[DECODING, i] == 0:
            tokens += counts[PENDING, i]
    for k in range(sizes[INBOX]):
        tokens += requests.prompt[each.inbox[replica, k]]
    return tokens + min(sizes[WHOLE], each.certified[replica, MOST_HELD]) * 1e-9


@compiled(allocates=False)
def _came(one: FleetReplica, reach_s: F, now_s: float) -> int:
    """How many of the inbox are here by now; at most as many as are decided on together."""
    came = 0
    while came < one.sizes[INBOX] and came < MAX_CANDIDATES and reach_s[one.inbox[came]] <= now_s:
        came += 1
    return came


@compiled(allocates=False)
def _send(inbox: N, sizes: N, reach_s: F, r: int) -> None:
    """Put a request into an inbox, by when it is there."""
    at = sizes[INBOX]
    while at > 0 and reach_s[inbox[at - 1]] > reach_s[r]:
        inbox[at] = inbox[at - 1]
        at -= 1
    inbox[at] = r
    sizes[INBOX] += 1


@compiled()
def _admit(now_s: float, one: FleetReplica, came: int, memory: N, run: Run) -> int:
    """Decide on the first `came` of the inbox and start those admitted. Returns how many were not: the first of the inbox."""
    requests, slos = run.requests, run.slos
    n, asking = one.sizes[COLUMNS], 0
    for k in range(came):
        asking += slos.first_due_s[one.inbox[k]] < np.inf
    new_counts, new_times = np.zeros((COUNTS, asking), np.int64), np.zeros((TIMES, asking))
    needs, accepted = np.zeros(asking, np.int64), np.zeros(asking, np.int64)
    result = Certificate(np.full(n + asking, -np.inf), np.full(1, np.inf))
    at = 0
    for k in range(came):
        r = one.inbox[k]
        if slos.first_due_s[r] < np.inf:
            new_counts[KIND, at], new_counts[PENDING, at] = STANDARD, requests.prompt[r]
            new_counts[LEFT, at] = requests.output[r]
            new_times[DUE_S, at], new_times[TPOT_S, at] = slos.first_due_s[r], KEPT_SHARE * requests.tightest_s[r]
            needs[at] = requests.prompt[r] + requests.output[r]
            at += 1
    if asking > 0:
        kv = Kv(float(run.limits.kv_tokens), 0)
        question = AdmissionQuestion(now_s, one.columns, n, Columns(new_counts, new_times), run.model, kv)
        decide(question, run.tpots_s, accepted, result)
        if accepted.any():
            one.certified[PATHS], one.certified[AT_S], one.certified[MOST_HELD] = ALONE, now_s, result.most_held[0]
            for i in range(n):
                one.columns.times[RELEASE_S, i] = result.release_s[i]
    at, released, left = 0, n, 0
    for k in range(came):
        r = one.inbox[k]
        asks = slos.first_due_s[r] < np.inf
        if not asks or accepted[at] == 0:
            one.inbox[left] = r
            left += 1
        else:
            run.out.admitted[r] = True
            memory[r] = needs[at]
            one.sizes[WHOLE] += needs[at]
            make_room(one, memory, run)
            n = one.sizes[COLUMNS]
            one.columns.counts[:, n] = new_counts[:, at]
            one.columns.times[:, n] = new_times[:, at]
            one.columns.times[RELEASE_S, n] = result.release_s[released]
            one.who[n] = r
            one.sizes[COLUMNS] = n + 1
            released += 1
        at += asks
    return left


@compiled()
def _end_step(end_s: float, one: FleetReplica, grants: N, memory: N, run: Run) -> None:
    """Judge the tokens of a step that has ended and remove requests that have all of theirs."""
    requests, slos, judgement, out = run.requests, run.slos, run.judgement, run.out
    n = one.sizes[COLUMNS]
    emits = np.zeros(n, np.bool_)
    counts, times = one.columns
    for i in range(n):
        emits[i] = grants[i] > 0 and grants[i] == counts[PENDING, i]
    commit(end_s, counts, times, n, grants)
    i = 0
    for k in range(n):
        if not emits[k]:
            i += 1
            continue
        r = one.who[i]
        last = judgement.tokens[r] + 1 == requests.output[r]
        judge_token(r, end_s, last, slos, judgement)
        if judgement.tokens[r] == 1:
            out.first_s[r] = end_s
        if memory[r] == 0:
            one.sizes[BEST_EFFORT_KV] += 1
        if not last:
            i += 1
            continue
        out.finish_s[r] = end_s
        if memory[r] > 0:
            one.sizes[WHOLE] -= memory[r]
            memory[r] = 0
        else:
            one.sizes[BEST_EFFORT_KV] -= requests.prompt[r] + requests.output[r]
            one.sizes[BEST_EFFORT_RUNNING] -= 1
        remove(one, i)
