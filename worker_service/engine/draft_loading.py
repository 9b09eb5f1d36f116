"""Makes the drafter of an engine from the models that draft, and measures what passes and drafts cost."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.services.domain.speculation.estimates import DraftCost, PassCost
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.draft_model import GREEDY, DraftModel
from penstock.worker_service.engine.profile import MEASURING_S
from penstock.worker_service.engine.runner import ModelRunner, Row
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.speculation.adaptive import AdaptiveDrafter, SpeculatingModel
from penstock.worker_service.speculation.sources import DraftRequest

if TYPE_CHECKING:
    from penstock.worker_service.engine.assembly import LoadedModel

_log = logging.getLogger(__name__)

Timer = Callable[[], float]

REPEATS, SLOW_S = 3, 0.03
CONTEXT_TOKENS = 32
"""Tokens before those whose passes are measured."""


def adaptive_drafter(
    core: EngineCore, loaded: Sequence["LoadedModel"], blocks: int, max_window: int, measuring_s: float = MEASURING_S
) -> AdaptiveDrafter:
    """A drafter for an idle core, whose timer it uses. blocks: of each model's KV pool.

    measuring_s: how long the measurements take at most, about: less than a second for small models.

    Raises:
        EngineUnusable: There is not enough memory for the KV pools.
    """
    limits, share_s = core.limits.batch, measuring_s / (len(loaded) + 1)
    models = list[SpeculatingModel]()
    for entry in sorted(loaded, key=lambda entry: entry.parameters):
        runner, context = entry.runner(blocks), entry.context_tokens
        model = DraftModel(runner, blocks, max_context_tokens=context, max_step_tokens=limits.max_step_tokens)
        passes = None  # the smallest model verifies nothing
        if models:
            pool = BlockPool(blocks, runner.kv_layout.block_tokens, reuse=False)
            passes = pass_cost(runner, pool, limits.max_running, max_window, context, core.timer, share_s / 2)
        cost = draft_cost(model, min(limits.max_running, 8), max_window, core.timer, share_s / 2)
        models.append(SpeculatingModel.measured(entry.name, model, cost, max_window, passes))
        _log.info(
            "%s drafts: %.3f ms a token%s", entry.name, cost.token_s * 1e3, ", compiled" if model.compiled else ""
        )
    context = core.limits.max_context_tokens
    target = pass_cost(core.runner, core.scheduler.pool, limits.max_running, max_window, context, core.timer, share_s)
    return AdaptiveDrafter(target, models, max_window, core.timer)


def pass_cost(
    runner: ModelRunner,
    pool: BlockPool,
    most: int,
    max_window: int,
    max_context_tokens: int,
    timer: Timer,
    most_s: float,
) -> PassCost:
    """The cost of a model's passes by replies, up to `most`, and tokens per reply, measured while it is idle.

    pool: of the runner's blocks, of which some are overwritten. most_s: the time in which larger numbers of replies must fit.
    """
    size = pool.block_tokens
    widths = sorted({1, 2, min(4, max_window + 1), max_window + 1})
    context = max(0, min(CONTEXT_TOKENS, max_context_tokens - max_window - 1, pool.count * size // 2)) // size * size
    each = -(-(max_window + 1) // size)
    most = min(most, 256, max(1, (pool.count - context // size) // each))
    replies = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < most] + [most]
    shared = pool.take(context // size)
    own = [pool.take(each) for _ in range(most)]
    measured = dict[tuple[int, int], float]()
    try:
        if context:
            runner.run([Row([0] * context, 0, shared, 0, GREEDY, 0, sequence="measured-0")])
        began_s = timer()
        for count in replies:
            if measured and 3 * (timer() - began_s) > most_s:  # twice the replies take twice as long
                break
            for width in widths:
                rows = [
                    Row([0] * width, context, [*shared, *own[i]], width, GREEDY, 0, sequence=f"measured-{i}")
                    for i in range(count)
                ]
                measured[count, width] = _seconds(functools.partial(runner.run, rows), timer)
    finally:
        pool.release([*shared, *(block for blocks in own for block in blocks)])
    return PassCost(measured)


def draft_cost(model: DraftModel, replies: int, window: int, timer: Timer, most_s: float) -> DraftCost:
    """The cost of a model's drafts for up to `replies` replies, or for two where more would take longer than `most_s`."""

    def numbered(number: int) -> DraftRequest:
        return DraftRequest(f"measured-{number}", [0] * CONTEXT_TOKENS, window + 1, GREEDY, 0)

    def catch_up() -> None:
        model.forget(requests[0].request_id)
        model.catch_up(requests[:1])

    requests = [numbered(0)]
    catch_up_s = _seconds(catch_up, timer)
    requests += map(numbered, range(1, max(2, min(replies, int(most_s / (4 * catch_up_s))))))
    model.catch_up(requests)
    try:
        one_s, one_long_s = (_seconds(functools.partial(model.draft, requests[:1], n), timer) for n in (1, window + 1))
        all_s, all_long_s = (_seconds(functools.partial(model.draft, requests, n), timer) for n in (1, window + 1))
    finally:
        for request in requests:
            model.forget(request.request_id)
    count = len(requests)
    one_step_s, all_step_s = (one_long_s - one_s) / window, (all_long_s - all_s) / window
    token_s = max(1e-7, (all_step_s - one_step_s) / (count - 1))
    step_s = max(0.0, one_step_s - token_s)
    reply_s = max(0.0, (all_s - one_s) / (count - 1) - token_s)
    return DraftCost(
        fixed_s=max(0.0, one_s - reply_s - step_s - token_s),
        reply_s=reply_s,
        step_s=step_s,
        token_s=token_s,
        catch_up_token_s=catch_up_s / CONTEXT_TOKENS,
    )


def _seconds(work: Callable[[], object], timer: Timer) -> float:
    """The shortest duration of `work`: other processes make it longer, never shorter. The first run may compile.

    What takes long is measured once.
    """
    shortest_s = math.inf
    work()
    for _ in range(REPEATS):
        began_s = timer()
        work()
        shortest_s = min(shortest_s, timer() - began_s)
        if shortest_s > SLOW_S:
            break
    return shortest_s
