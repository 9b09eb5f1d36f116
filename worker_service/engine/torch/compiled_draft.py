"""Drafts by a small model in one compiled loop, without Python or torch between two tokens.

A small model computes a token in less time than Python takes to call its operations. A draft does not have to be exact,
because every token of it is verified; still, the loop computes the model's own tokens up to rounding, and draws them with the
random numbers of their positions, as the verifier does.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.services import tiles
from penstock.services.compilation import compiled
from penstock.services.tiles import F32
from penstock.worker_service.engine.runner import Draft
from penstock.worker_service.engine.torch.compiled_forward import CompiledForward, Constants, forward
from penstock.worker_service.engine.torch.kernels import I64
from penstock.worker_service.engine.torch.step_layout import StepLayout

F64 = npt.NDArray[np.float64]


class DraftColumns(NamedTuple):
    """B sequences. tables (B, most blocks). known (B, most tokens). places (B, 3): position of the first known token,
    number of known tokens, number of tokens to draft. sampling (B, 3): temperature, top-p, top-k. chances (B, W): of what
    is drawn.
    """

    tables: I64
    known: I64
    places: I64
    sampling: F64
    chances: F64


class CompiledDraft:
    """The loop over the weights and the KV of a compiled pass."""

    def __init__(self, compiled: CompiledForward) -> None:
        self._forward = compiled

    def __call__(self, drafts: list[Draft], least: float) -> list[list[int]]:
        """The drafted tokens of each sequence. Their KV, but that of the last one, is in the pool then.

        least: a greedy draft ends before the first token that has less than this chance to be accepted, by the model's own
        probabilities of the tokens up to it.
        """
        size = self._forward.block_tokens
        most = max(len(draft.chances) for draft in drafts)
        tables = np.zeros((len(drafts), max(len(draft.blocks) for draft in drafts)), np.int64)
        known = np.zeros((len(drafts), max(len(draft.tokens) for draft in drafts)), np.int64)
        places = np.empty((len(drafts), 3), np.int64)
        sampling = np.empty((len(drafts), 3), np.float64)
        chances = np.zeros((len(drafts), most), np.float64)
        for i, draft in enumerate(drafts):
            used = -(-(draft.start + len(draft.tokens) + len(draft.chances) - 1) // size)
            tables[i, :used] = draft.blocks[:used]
            known[i, : len(draft.tokens)] = draft.tokens
            places[i] = draft.start, len(draft.tokens), len(draft.chances)
            sampling[i] = draft.temperature, draft.top_p, draft.top_k
            chances[i, : len(draft.chances)] = draft.chances
        out = np.empty((len(drafts), most), np.int64)
        counts = np.empty(len(drafts), np.int64)
        columns = DraftColumns(tables, known, places, sampling, chances)
        _draft(self._forward.constants, self._forward.head, self._forward.kv, columns, least, out, counts)
        return [row[:count].tolist() for row, count in zip(out, counts, strict=True)]


@compiled(fastmath=True)
def _greedy(logits: F32) -> tuple[int, float]:
    """The most likely token and its probability."""
    token = int(np.argmax(logits))
    mass = np.float32(0.0)
    for t in range(logits.shape[0]):
        mass += np.exp(logits[t] - logits[token])
    return token, 1.0 / float(mass)


@compiled()
def _drawn(logits: F32, temperature: float, top_p: float, top_k: int, chance: float) -> int:
    """The token at the fraction `chance` of what top-k and then top-p leave, as in `sampling.choose`."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = np.argsort(-weights, kind="mergesort")
    count = min(top_k, len(order)) if top_k > 0 else len(order)
    total = 0.0
    for i in range(count):
        total += weights[order[i]]
    if top_p < 1.0:
        mass, sum_so_far = total, 0.0
        for i in range(count):
            if sum_so_far >= top_p * mass:
                count, total = i, sum_so_far
                break
            sum_so_far += weights[order[i]]
    goal, sum_so_far = chance * total, 0.0
    for i in range(count):
        sum_so_far += weights[order[i]]
        if sum_so_far > goal:
            return int(order[i])
    return int(order[count - 1])


@compiled(fastmath=True)
def _draft(
    model: Constants, head: F32, kv: tuple[F32, F32], drafts: DraftColumns, least: float, out: I64, counts: I64
) -> None:
    """Draft for each sequence in turn; `out` (B, W) and `counts` (B,) are the result. kv: as in `forward`."""
    tables, known, places, sampling, chances = drafts
    size = kv[1].shape[3]
    no_bias = np.empty(0, np.float32)
    logits = np.empty((1, model.vocab), np.float32)
    for b in range(tables.shape[0]):
        start, given, window = places[b, 0], places[b, 1], places[b, 2]
        drafted, survival = 0, 1.0
        tokens, first = known[b, :given].copy(), start  # those of the next pass
        while drafted < window:
            positions = np.arange(first, first + len(tokens))
            hidden = np.empty((len(tokens), model.embedding.shape[1]), np.float32)
            slots = tables[b, positions // size] * size + positions % size
            layout = StepLayout(positions, np.full(len(tokens), b), slots, np.array([0, len(tokens)]))
            forward(model, kv, tokens, layout, tables, hidden)
            tiles.product(hidden[len(tokens) - 1 :], head, no_bias, logits)
            if sampling[b, 0] == 0.0:
                out[b, drafted], probability = _greedy(logits[0])
                survival *= probability
                if survival < least:
                    break
            else:
                out[b, drafted] = _drawn(
                    logits[0], sampling[b, 0], sampling[b, 1], int(sampling[b, 2]), chances[b, drafted]
                )
            tokens, first = out[b, drafted : drafted + 1], first + len(tokens)
            drafted += 1
        counts[b] = drafted
