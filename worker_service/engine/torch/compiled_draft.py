"""Drafts by a small model in one compiled loop, without Python or torch between two tokens.

A small model computes a token in less time than Python takes to call its operations. A draft does not have to be exact,
because every token of it is verified; still, the loop computes the model's own tokens up to rounding, and draws them with the
random numbers of their positions, as the verifier does.
"""

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from services import tiles
from services.tiles import F32
from worker_service.engine.torch.compiled_forward import CompiledForward, Weights, forward
from worker_service.engine.torch.kernels import I64

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draft:
    """What to draft for one sequence. tokens: known ones without KV, at least one. start: their first position.

    temperature: 0 for greedy. chances: random numbers, one for each token to draft.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    temperature: float
    top_p: float
    top_k: int
    chances: list[float]


class CompiledDraft:
    """The loop over the weights and the KV of a compiled pass."""

    def __init__(self, compiled: CompiledForward) -> None:
        self._forward = compiled

    def __call__(self, drafts: list[Draft], least: float) -> list[list[int]]:
        """The drafted tokens of each sequence. Their KV, but that of the last one, is in the pool then.

        least: a greedy draft ends before the first token that has less than this chance to stand, by the model's own
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
        constants = self._forward.constants
        _draft(
            constants.weights,
            constants.embedding,
            constants.last_norm,
            self._forward.head,
            constants.inverse_frequencies,
            constants.angle_scale,
            constants.eps,
            constants.scale,
            constants.heads,
            *self._forward.kv,
            tables,
            known,
            places,
            sampling,
            chances,
            least,
            out,
            counts,
        )
        return [row[:count].tolist() for row, count in zip(out, counts, strict=True)]


@numba.njit(nogil=True, fastmath=True, cache=True)
def _greedy(logits: F32) -> tuple[int, float]:
    """The most likely token and its probability."""
    token = int(np.argmax(logits))
    mass = np.float32(0.0)
    for t in range(logits.shape[0]):
        mass += np.exp(logits[t] - logits[token])
    return token, 1.0 / float(mass)


@numba.njit(nogil=True, cache=True)
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


@numba.njit(nogil=True, fastmath=True, cache=True)
def _draft(
    weights: Weights,
    embedding: F32,
    last_norm: F32,
    head: F32,
    inverse_frequencies: F32,
    angle_scale: float,
    eps: float,
    scale: float,
    heads: int,
    k_pools: F32,
    v_pools: F32,
    tables: I64,
    known: I64,
    places: I64,
    sampling: F64,
    chances: F64,
    least: float,
    out: I64,
    counts: I64,
) -> None:
    """Draft for each sequence in turn; `out` (B, W) and `counts` (B,) are the result.

    k_pools (L, blocks, Hkv, D, slots), v_pools (L, blocks, Hkv, slots, D). known (B, most tokens). places (B, 3): position of
    the first known token, number of known tokens, number of tokens to draft. sampling (B, 3): temperature, top-p, top-k.
    """
    size = v_pools.shape[3]
    no_bias = np.empty(0, np.float32)
    logits = np.empty((1, embedding.shape[0]), np.float32)
    for b in range(tables.shape[0]):
        start, given, window = places[b, 0], places[b, 1], places[b, 2]
        drafted, survival = 0, 1.0
        tokens, first = known[b, :given].copy(), start  # those of the next pass
        while drafted < window:
            positions = np.arange(first, first + len(tokens))
            hidden = np.empty((len(tokens), embedding.shape[1]), np.float32)
            forward(
                weights,
                embedding,
                last_norm,
                inverse_frequencies,
                angle_scale,
                eps,
                scale,
                heads,
                k_pools,
                v_pools,
                tokens,
                positions,
                tables,
                np.array([0, len(tokens)]),
                np.full(len(tokens), b),
                tables[b, positions // size] * size + positions % size,
                hidden,
            )
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
