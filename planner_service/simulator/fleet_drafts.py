"""Drafts for the promised decodes of a replica of a fleet, compiled. No I/O."""

from penstock.planner_service.simulator.drafts import best_window, standing, window_s
from penstock.planner_service.simulator.fleet_replica import COLUMNS, FleetReplica, Run
from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.certified_step import MOST_HELD, certify_after
from penstock.services.domain.slo.compiled.layout import CONTEXT, DECODING, KIND, STANDARD, Kv, N


@compiled(allocates=False)
def _drafts(counts: N, grants: N, i: int) -> bool:
    return bool(counts[KIND, i] == STANDARD and counts[DECODING, i] == 1 and grants[i] == 1)


@compiled()
def draft(now_s: float, took_s: float, one: FleetReplica, grants: N, drafted: N, run: Run) -> float:
    """Draft for the promised decodes of the planned step; by how much it takes longer.

    As many tokens as a worker drafts (`worker_service.scheduling.slo_drafts`): all promises are kept if the step takes so
    much longer and no draft is accepted, with KV for all drafted tokens set aside. drafted (zeros): out: tokens of each that
    are accepted.
    """
    columns, n, model, limits = one.columns, one.sizes[COLUMNS], run.model, run.limits
    tokens, decodes, context = 0, 0, 0.0
    for i in range(n):
        tokens += grants[i]
        if _drafts(columns.counts, grants, i):
            decodes += 1
            context += columns.counts[CONTEXT, i] + 1.0
    if decodes == 0:
        return 0.0
    room, more_s = model.max_step_tokens - tokens, 0.0
    window = best_window(took_s, tokens, decodes, context, room, model, limits.drafts)
    while window > 0:
        more_s = window_s(window, tokens, decodes, context, model, limits.drafts)
        kv = Kv(float(limits.kv_tokens - window * decodes), 0)
        if certify_after(now_s + took_s + more_s, columns, n, model, kv, one.certified, grants):
            break
        window //= 2
    if window == 0:
        return 0.0
    one.certified[MOST_HELD] += window * decodes
    for i in range(n):
        if _drafts(columns.counts, grants, i):
            r = one.who[i]
            produced = run.judgement.tokens[r]
            most = min(window, run.requests.output[r] - produced - 1)
            drafted[i] = standing(r, produced, most, limits.drafts.acceptance)
    return more_s
