"""Drafts for the promised decodes of a replica of a fleet, compiled. No I/O."""

from penstock.planner_service.simulator.drafts import best_window, standing, window_s
from penstock.planner_service.simulator.fleet_replica import (
    COLUMNS,
    FleetLimits,
    FleetReplica,
    Run,
)
from penstock.services.compilation import compiled
from penstock.services.domain.slo.compiled.certified_step import MOST_HELD, certify_after
from penstock.services.domain.slo.compiled.layout import CONTEXT, DECODING, KIND, STANDARD, Kv, N, StepModel


@compiled(allocates=False)
def _drafts(counts: N, grants: N, i: int) -> bool:
    return bool(counts[KIND, i] == STANDARD and counts[DECODING, i] == 1 and grants[i] == 1)


@compiled()
def draft(now_s: float, took_s: float, one: FleetReplica, grants: N, drafted: N, run: Run) -> float:
    """Draft for the promised decodes of the planned step; by how much it takes longer.

    drafted (zeros): out: tokens of each that are accepted.
    """
    window, more_s = _window(now_s, took_s, one, grants, run.model, run.limits)
    for i in range(one.sizes[COLUMNS]):
        r = one.who[i]
        if window > 0 and _drafts(one.columns.counts, grants, i):
            produced = run.judgement.tokens[r]
            most = min(window, run.requests.output[r] - produced - 1)
            drafted[i] = standing(r, produced, most, run.limits.drafts.acceptance)
    return more_s


@compiled()
def _window(
    now_s: float, took_s: float, one: FleetReplica, grants: N, model: StepModel, limits: FleetLimits
) -> tuple[int, float]:
    """How many tokens are drafted for each promised decode of the planned step, and by how much it takes longer.

    As a worker does (`worker_service.scheduling.slo_drafts`): all promises are kept if the step takes so much longer and no
    draft is accepted, with KV for all drafted tokens set aside.
    """
    columns, n = one.columns, one.sizes[COLUMNS]
    tokens, decodes, context = 0, 0, 0.0
    for i in range(n):
        tokens += grants[i]
        if _drafts(columns.counts, grants, i):
            decodes += 1
            context += columns.counts[CONTEXT, i] + 1.0
    if decodes == 0:
        return 0, 0.0
    room = model.max_step_tokens - tokens
    window = best_window(took_s, tokens, decodes, context, room, model, limits.drafts)
    while window > 0:
        more_s = window_s(window, tokens, decodes, context, model, limits.drafts)
        kv = Kv(float(limits.kv_tokens - window * decodes), 0)
        if certify_after(now_s + took_s + more_s, columns, n, model, kv, one.certified, grants):
            one.certified[MOST_HELD] += window * decodes
            return window, more_s
        window //= 2
    return 0, 0.0
