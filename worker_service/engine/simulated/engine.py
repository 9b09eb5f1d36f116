"""An engine whose steps take time by a latency model and generate letters, for tests, planning and replays.

The next token is a function of the last one and its position, so a reply is the same on every instance. It ends at each
position with a fixed probability, by the same random numbers. The "KV" of a token is the token itself.

Penalties and biases apply to logits by which the next token is a little more likely than every other letter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.services.clock import Clock, SystemClock
from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.randomness import uniform
from penstock.types.sampling import SamplingParams
from penstock.types.workers import KvLayout
from penstock.worker_service.engine.core import CoreLimits, EngineCore
from penstock.worker_service.engine.extension import Progress, untold
from penstock.worker_service.engine.held_tokens import OutputCoalescing
from penstock.worker_service.engine.interface import EngineInfo
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.engine.penalties import logit_changes
from penstock.worker_service.engine.runner import RawLogprobs, Row, RowResult
from penstock.worker_service.scheduling.batching import BatchLimits
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.scheduling.policies import PolicyName, batch_policy
from penstock.worker_service.text.tokenizer import ByteTokenizer

LOADED_PARTS = 20  # of a model that takes time to load
OWN_SHARE = 0.9  # probability that the model reports for the chosen token
_NEXT_LOGIT, _LETTER_LOGIT, _OTHER_LOGIT = -1.0, -1.5, -50.0  # other tokens than letters need a bias
_VOCAB = ByteTokenizer.vocab_size
_LETTERS = b"abcdefghijklmnopqrstuvwxyz "
_SPACE = np.frombuffer(b" \t\r\n", np.uint8)
_CLOSING = np.frombuffer(b'"}]', np.uint8)


@dataclass(frozen=True, slots=True)
class SimulatedEngineOptions:
    """latency: of a step. reply_tokens: mean length of a reply. The other fields are as in the tier of a mesh file."""

    name: str
    latency: StepLatencyModel
    reply_tokens: int = 64
    kv_tokens: int = 32_768
    kv_block_tokens: int = 16
    max_running: int = 32
    max_queued: int = 64
    max_step_tokens: int = 512
    max_context_tokens: int = 8192
    batch_policy: PolicyName = PolicyName.DECODE_FIRST
    best_effort_reserve: float = 0.0


class SimulatedRunner:
    """A ModelRunner that only takes time."""

    def __init__(self, options: SimulatedEngineOptions, blocks: int, clock: Clock) -> None:
        self._options, self._clock = options, clock
        self._kv = np.zeros((blocks, options.kv_block_tokens), np.float32)
        self.kv_layout = KvLayout(f"simulated-{options.name}", 1, 1, 1, options.kv_block_tokens, "float32")

    def run(self, rows: Sequence[Row]) -> list[RowResult]:
        tokens = sum(len(row.tokens) for row in rows)
        context = sum(row.start + len(row.tokens) for row in rows)
        self._clock.sleep(self._options.latency.step_s(StepLoad(tokens, context)))
        return [self._row(row) for row in rows]

    def read_blocks(self, blocks: Sequence[int], out: npt.NDArray[np.generic] | None = None) -> npt.NDArray[np.generic]:
        data = self._kv[list(blocks)]
        copied = np.stack((data, data), axis=1)[:, None]
        if out is None:
            return copied
        out[...] = copied
        return out

    def write_blocks(self, blocks: Sequence[int], data: npt.NDArray[np.generic]) -> None:
        expected = (len(blocks), 1, 2, self._options.kv_block_tokens)
        if data.shape != expected:
            raise ValueError(f"blocks of shape {data.shape}, not {expected}")
        self._kv[list(blocks)] = data[:, 0, 0]

    def _row(self, row: Row) -> RowResult:
        size = self._options.kv_block_tokens
        for i, token in enumerate(row.tokens):
            block, place = divmod(row.start + i, size)
            self._kv[row.blocks[block], place] = token
        chosen, count = [self._chosen(row, i) for i in range(row.logits)], row.sampling.top_logprobs
        return RowResult(chosen, [] if count is None else [self._logprobs(token, count) for token in chosen])

    def _chosen(self, row: Row, index: int) -> int:
        """The token at a position with logits."""
        place = len(row.tokens) - row.logits + index
        last, position = row.tokens[place], row.start + place
        token = self._next(last, position, row.offset + index, row.sampling.ignore_eos)
        if row.output or row.sampling.logit_bias:
            token = _adjusted(token, row.sampling, row.output_before(index), position)
        return token if row.allowed is None else _fitting(token, row.allowed[index], last, position)

    def _next(self, token: int, position: int, offset: int, endless: bool) -> int:
        """The token that follows `token` at `position`; the first one never ends a reply."""
        if offset > 0 and not endless and uniform(token, position, 7) < 1 / self._options.reply_tokens:
            return ByteTokenizer.END
        return _LETTERS[int(uniform(token, position, 8) * len(_LETTERS))]

    @staticmethod
    def _logprobs(chosen: int, count: int) -> RawLogprobs:
        rest = math.log((1 - OWN_SHARE) / (_VOCAB - 1))
        ids = [chosen, *(i for i in range(count) if i != chosen)][:count]
        return RawLogprobs(math.log(OWN_SHARE), ids, [math.log(OWN_SHARE) if i == chosen else rest for i in ids])


def _adjusted(token: int, sampling: SamplingParams, output: Sequence[int], position: int) -> int:
    """The most likely token after penalties and biases; of several the next one, otherwise any letter of them."""
    changes = logit_changes(sampling, output, _VOCAB)
    if changes is None:
        return token
    logits = np.full(_VOCAB, _OTHER_LOGIT)
    logits[list(_LETTERS)] = _LETTER_LOGIT
    logits[token] = _NEXT_LOGIT
    changed = logits[changes.token_ids]  # all negative
    logits[changes.token_ids] = changed * changes.divisors + changes.summands
    best = np.flatnonzero(logits == logits.max())
    return token if token in best else int(best[int(uniform(token, position, 10) * len(best))])


def _fitting(token: int, allowed: npt.NDArray[np.int32], last: int, position: int) -> int:
    """The token, or one that is allowed in its place: where the reply would end, one that closes what is open. White space
    only where nothing else is allowed."""
    fit = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")[:_VOCAB])
    if token in fit:
        return token
    closing = fit[np.isin(fit, _CLOSING)] if token == ByteTokenizer.END else fit[:0]
    visible = fit[~np.isin(fit, _SPACE)]
    choice = closing if len(closing) else visible if len(visible) else fit
    return int(choice[int(uniform(last, position, 9) * len(choice))])


def simulated_core(options: SimulatedEngineOptions, clock: Clock) -> tuple[EngineCore, EngineInfo]:
    """A core that sleeps on `clock`. For a simulation, pass a VirtualClock and call `step`."""
    blocks = max(1, options.kv_tokens // options.kv_block_tokens)
    context = min(options.max_context_tokens, blocks * options.kv_block_tokens)
    runner = SimulatedRunner(options, blocks, clock)
    limits = CoreLimits(BatchLimits(options.max_running, options.max_step_tokens), options.max_queued, context)
    policy = batch_policy(options.batch_policy, options.latency, options.best_effort_reserve)
    core = EngineCore(runner, ByteTokenizer(), BlockPool(blocks, options.kv_block_tokens), limits, clock, policy)
    return core, core.info("simulated", options.name)


def simulated_engine(
    options: SimulatedEngineOptions,
    hold: OutputCoalescing | None = None,
    *,
    load_s: float = 0.0,
    progress: Progress = untold,
) -> LoopEngine:
    """The simulated engine in real time. load_s: that loading takes."""
    clock = SystemClock()

    def loaded() -> tuple[EngineCore, EngineInfo]:
        for part in range(LOADED_PARTS):
            progress(part / LOADED_PARTS)
            clock.sleep(load_s / LOADED_PARTS)
        return simulated_core(options, clock)

    return LoopEngine(loaded, hold)
