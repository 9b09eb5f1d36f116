"""Loads the models that draft for the torch engine's model, and measures what passes and drafts cost."""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.domain.requests import SamplingParams
from services.domain.speculation.estimates import DraftCost, PassCost
from worker_service.engine.core import EngineCore
from worker_service.engine.interface import EngineUnusable, KvLayout
from worker_service.engine.runner import ModelRunner, Row
from worker_service.engine.torch.draft_model import DraftModel
from worker_service.engine.torch.plain_model import CausalModel
from worker_service.engine.torch.runner import TorchRunner, kv_layout
from worker_service.scheduling import BlockPool
from worker_service.speculation.adaptive import AdaptiveDrafter, SpeculatingModel
from worker_service.speculation.sources import DraftRequest
from worker_service.text.hf import HfTokenizer

_log = logging.getLogger(__name__)

REPEATS = 3
CONTEXT_TOKENS = 64
"""Tokens before those whose passes are measured."""
GREEDY = SamplingParams(temperature=0.0)


class OtherTokens(EngineUnusable):
    """A model cannot draft for another one, because its tokens differ."""


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """A model that drafts, before it has a KV pool."""

    name: str
    model: CausalModel
    layout: KvLayout


def load_draft_model(
    folder: Path, load: Callable[[Path], CausalModel], tokenizer: HfTokenizer, block_tokens: int
) -> LoadedDraftModel:
    """Load a model that drafts. load: as the engine loads its own model.

    Raises:
        EngineUnusable: It cannot be loaded.
        OtherTokens: Its tokens differ from those of `tokenizer`, the target's.
    """
    model = load(folder)
    if not HfTokenizer(folder, model.config.vocab_size).has_tokens_of(tokenizer):
        raise OtherTokens(f"speculation.drafters: {folder}: its tokenizer has other tokens than the tier's model")
    return LoadedDraftModel(folder.name, model, kv_layout(model, block_tokens, ""))


def adaptive_drafter(
    core: EngineCore,
    loaded: list[LoadedDraftModel],
    blocks: int,
    max_window: int,
    *,
    threads: int = 1,
    compiled: bool | None = None,
) -> AdaptiveDrafter:
    """A drafter for an idle core, whose timer it uses. blocks: of each model's KV pool. threads, compiled: as in TorchRunner.
    Takes less than a second for small models.

    Raises:
        EngineUnusable: There is not enough memory for the KV pools.
    """
    limits = core.limits.batch
    models = list[SpeculatingModel]()
    for entry in sorted(loaded, key=lambda entry: entry.model.num_parameters()):
        try:
            runner = TorchRunner(entry.model, blocks, entry.layout, threads=threads, compiled=compiled)
        except RuntimeError as error:
            raise EngineUnusable(f"speculation.drafters: {entry.name}: no memory for its KV cache: {error}") from error
        context = entry.model.config.max_position_embeddings
        model = DraftModel(
            runner, blocks, max_context_tokens=context, max_step_tokens=limits.max_step_tokens, compiled=compiled
        )
        passes = None  # the smallest model verifies nothing
        if models:
            pool = BlockPool(blocks, entry.layout.block_tokens, reuse=False)
            passes = pass_cost(runner, pool, limits.max_running, max_window, context, core.timer)
        cost = draft_cost(model, min(limits.max_running, 8), max_window, core.timer)
        models.append(SpeculatingModel.measured(entry.name, model, cost, max_window, passes))
        _log.info(
            "%s drafts: %.3f ms a token%s", entry.name, cost.token_s * 1e3, ", compiled" if model.compiled else ""
        )
    context = core.limits.max_context_tokens
    target = pass_cost(core.runner, core.scheduler.pool, limits.max_running, max_window, context, core.timer)
    return AdaptiveDrafter(target, models, max_window, core.timer)


def pass_cost(
    runner: ModelRunner,
    pool: BlockPool,
    most: int,
    max_window: int,
    max_context_tokens: int,
    timer: Callable[[], float],
) -> PassCost:
    """The cost of a model's passes by replies, up to `most`, and tokens per reply, measured while it is idle.

    pool: of the runner's blocks, of which some are overwritten.
    """
    widths = sorted({1, 2, min(4, max_window + 1), max_window + 1})
    replies = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < most] + [min(most, 256)]
    context = min(CONTEXT_TOKENS, max_context_tokens - max_window - 1, pool.count * pool.block_tokens // 2)
    each = -(-(context + max_window + 1) // pool.block_tokens)
    blocks = pool.take(min(pool.count, each * replies[-1]))
    tables = [blocks[first : first + each] for first in range(0, max(1, len(blocks) - each + 1), each)]
    measured = dict[tuple[int, int], float]()
    try:
        for count in replies:
            for width in widths:
                # KV of its own for each reply, as far as there is room: reading it is a part of the cost
                rows = [Row([0] * width, context, tables[i % len(tables)], width, GREEDY, 0) for i in range(count)]
                measured[count, width] = _seconds(functools.partial(runner.run, rows), timer)
    finally:
        pool.release(blocks)
    return PassCost(measured)


def draft_cost(model: DraftModel, replies: int, window: int, timer: Callable[[], float]) -> DraftCost:
    """The cost of a model's drafts, measured."""
    requests = [
        DraftRequest(f"measured-{i}", [0] * CONTEXT_TOKENS, window + 1, GREEDY, 0) for i in range(max(2, replies))
    ]

    def catch_up() -> None:
        for request in requests:
            model.forget(request.request_id)
        model.catch_up(requests)

    catch_up_s = _seconds(catch_up, timer)
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
        catch_up_token_s=catch_up_s / (count * CONTEXT_TOKENS),
    )


def _seconds(work: Callable[[], object], timer: Callable[[], float]) -> float:
    """The shortest duration of `work`: other processes make it longer, never shorter. The first run may compile."""
    shortest_s = math.inf
    work()
    for _ in range(REPEATS):
        began_s = timer()
        work()
        shortest_s = min(shortest_s, timer() - began_s)
    return shortest_s
