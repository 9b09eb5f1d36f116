"""Measures the latency cost of batches, for fitting the QoE model (CascadeInfer, section 4.1).

Runs an `EngineCore`. For each bucket of lengths, each batch size and each range of INPUT_SHARES, that many requests are kept
in flight: when one ends, the next starts. A sample is one request: its normalised latency, and the load of the batch averaged
over its lifetime.

The inputs of a batch are a small part of its lengths or most of them: only so are the cost of inputs (D2) and the cost of
lengths so far (D4) told apart. Where every request draws its own share, large batches all have the same one.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.services.domain.stages.qoe import BatchLoad, InFlight
from penstock.types.replies import TokenFrame
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.profile import OnProgress, add_request

SHORTEST_TOKENS = 32
INPUT_SHARES = ((0.2, 0.35), (0.65, 0.8))  # ranges of the input's share of the final length
MAX_CELL_TOKENS = 4_096  # batch size times largest length of a bucket
MEASURE_S = 60.0
LEAST_SAMPLES = 10  # half of them are held out, and the model has five coefficients


QoeSample = tuple[BatchLoad, float]
"""One request: mean load of its batches, and its latency from arrival to last token, in seconds per output token."""


@dataclass(frozen=True, slots=True)
class QoeCell:
    """`requests` concurrent requests with final lengths of from_tokens to to_tokens - 1 tokens.

    input_share: range from which each request draws its input's share of the final length.
    """

    from_tokens: int
    to_tokens: int
    requests: int
    input_share: tuple[float, float]


@dataclass(slots=True)
class _Life:
    """A request that is being measured. sums: load of the batch, weighted by the duration of each step."""

    input_tokens: int
    output_tokens: int
    began_s: float
    counts: bool  # the first of each slot are shortened, so that ends are spread out, and are not counted
    emitted: int = 0
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    busy_s: float = 0.0


def profile_cells(core: EngineCore) -> list[QoeCell]:
    """Exponential length buckets times batch sizes 1, 2, 4, ... that fit the engine, times INPUT_SHARES; small ones first."""
    room = min(core.scheduler.pool.count * core.scheduler.pool.block_tokens, MAX_CELL_TOKENS)
    cells = []
    low = SHORTEST_TOKENS
    while 2 * low <= core.limits.max_context_tokens:
        n = 1
        while n <= core.limits.batch.max_running and n * (2 * low + core.scheduler.pool.block_tokens) <= room:
            cells += [QoeCell(low, 2 * low, n, share) for share in INPUT_SHARES]
            n *= 2
        low *= 2
    return sorted(cells, key=lambda cell: cell.requests * cell.to_tokens)


def measure_qoe(
    core: EngineCore,
    cells: Sequence[QoeCell],
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: OnProgress = lambda _, __: None,
    most_s: float = math.inf,
) -> list[QoeSample]:
    """Measure each cell until every slot has served a complete request. The core must be idle, and is idle afterwards.

    most_s: after so many seconds it ends, in the middle of a cell, too; a slow model is measured in the first cells only.
    """
    rng, samples, until_s = random.Random(seed), list[QoeSample](), clock() + most_s
    for done, cell in enumerate(cells):
        on_progress(done, len(cells))
        samples += _measure_cell(core, cell, rng, clock, until_s)
    on_progress(len(cells), len(cells))
    return samples


def _measure_cell(
    core: EngineCore, cell: QoeCell, rng: random.Random, clock: Callable[[], float], until_s: float
) -> Iterator[QoeSample]:
    vocab = core.tokenizer.vocab_size
    lives: dict[str, _Life] = {}
    remaining, started = cell.requests, 0

    def begin(share: float) -> None:
        nonlocal started
        tokens = rng.randrange(cell.from_tokens, cell.to_tokens)
        inputs = max(2, round(tokens * rng.uniform(*cell.input_share)))
        outputs = max(1, round((tokens - inputs) * share))
        name, started = f"qoe-{started}", started + 1
        add_request(core, name, [rng.randrange(vocab) for _ in range(inputs)], outputs)
        lives[name] = _Life(inputs, outputs, clock(), counts=share == 1.0)

    for i in range(cell.requests):
        begin((i + 0.5) / cell.requests if cell.requests > 1 else 1.0)
    try:
        while remaining > 0 and clock() < until_s:
            load = BatchLoad.of(
                InFlight(life.input_tokens + life.emitted, life.input_tokens) for life in lives.values()
            )
            before = clock()
            events = core.step()
            now = clock()
            for life in lives.values():
                step_s = now - before
                life.sums = tuple(total + step_s * part for total, part in zip(life.sums, load, strict=True))
                life.busy_s += step_s
            for name, event in events:
                if not isinstance(event, TokenFrame):
                    continue
                life = lives[name]
                life.emitted += len(event.token_ids)
                if life.emitted >= life.output_tokens:
                    del lives[name]
                    if life.counts:
                        remaining -= 1
                        mean = BatchLoad(*(total / life.busy_s for total in life.sums))
                        yield mean, (now - life.began_s) / life.output_tokens
                    begin(1.0)
    finally:
        for name in lives:
            core.abort(name)
