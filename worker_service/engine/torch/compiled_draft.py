"""Drafts by a small Llama model in one compiled loop, without Python or torch between two tokens.

A small model computes a token in less time than Python takes to call its operations. A draft does not have to be exact,
because every token of it is verified; still, the loop computes the model's own tokens up to rounding, and draws them with the
random numbers of their positions, as the verifier does.
"""

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt
import torch

from worker_service.engine.torch import kernels
from worker_service.engine.torch.attention import KvPool
from worker_service.engine.torch.forward import can_fuse
from worker_service.engine.torch.kernels import F32, I64
from worker_service.engine.torch.plain_model import CausalModel, architecture

F64 = npt.NDArray[np.float64]

MAX_PARAMETERS = 20_000_000
"""Larger models compute for longer than the calls of their operations take, so torch's products are the better choice."""


def can_compile(model: CausalModel) -> bool:
    """Whether the loop computes this model: Llama without biases, in float32 on a CPU, and small."""
    config = model.config
    return (
        architecture(model) == "LlamaForCausalLM"
        and can_fuse(model)
        and model.device.type == "cpu"
        and model.dtype == torch.float32
        and not (config.attention_bias or config.mlp_bias)
        and model.num_parameters() <= MAX_PARAMETERS
    )


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
    """The weights of a model for the loop, transposed (inputs, outputs), one array for all layers."""

    def __init__(self, model: CausalModel, pool: KvPool) -> None:
        """pool: of the model's KV, in float32 on the CPU."""
        layers = model.model.layers
        assert pool.stacked is not None  # it is on the CPU
        self._pool, self._kv = pool, pool.stacked

        def stacked(*names: str) -> F32:
            """(L, inputs, outputs) of products, next to each other."""
            rows = [torch.cat([layer.get_submodule(name).weight.data for name in names]).T for layer in layers]
            return torch.stack(rows).contiguous().numpy()

        self._weights = (
            model.model.embed_tokens.weight.data.numpy(),
            stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            stacked("self_attn.o_proj"),
            stacked("mlp.gate_proj", "mlp.up_proj"),
            stacked("mlp.down_proj"),
            torch.stack([layer.input_layernorm.weight.data for layer in layers]).numpy(),
            torch.stack([layer.post_attention_layernorm.weight.data for layer in layers]).numpy(),
            model.model.norm.weight.data.numpy(),
            model.lm_head.weight.data.T.contiguous().numpy(),
        )
        self._inverse_frequencies = model.model.rotary_emb.inv_freq.float().numpy()
        self._angle_scale = float(model.model.rotary_emb.attention_scaling)
        self._eps = float(model.config.rms_norm_eps)
        self._scale = float(layers[0].self_attn.scaling)
        self._heads = int(model.config.num_attention_heads)

    def __call__(self, drafts: list[Draft], least: float) -> list[list[int]]:
        """The drafted tokens of each sequence. Their KV, but that of the last one, is in the pool then.

        least: a greedy draft ends before the first token that has less than this chance to stand, by the model's own
        probabilities of the tokens up to it.
        """
        size = self._pool.block_tokens
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
        keys, values = self._kv
        _draft(
            *self._weights,
            self._inverse_frequencies,
            self._angle_scale,
            self._eps,
            self._scale,
            self._heads,
            keys,
            values,
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
def _product(x: F32, weight: F32, out: F32) -> None:
    """Multiply x (inputs,) by weight (inputs, outputs)."""
    inputs, outputs = weight.shape
    whole = inputs - inputs % 8
    out[:] = np.float32(0.0)
    for i in range(0, whole, 8):
        x0, x1, x2, x3, x4, x5, x6, x7 = x[i], x[i + 1], x[i + 2], x[i + 3], x[i + 4], x[i + 5], x[i + 6], x[i + 7]
        for o in range(outputs):
            out[o] += (
                x0 * weight[i, o]
                + x1 * weight[i + 1, o]
                + x2 * weight[i + 2, o]
                + x3 * weight[i + 3, o]
                + x4 * weight[i + 4, o]
                + x5 * weight[i + 5, o]
                + x6 * weight[i + 6, o]
                + x7 * weight[i + 7, o]
            )
    for i in range(whole, inputs):
        for o in range(outputs):
            out[o] += x[i] * weight[i, o]


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
    embedding: F32,
    qkv_weights: F32,
    out_weights: F32,
    gate_up_weights: F32,
    down_weights: F32,
    input_norms: F32,
    mlp_norms: F32,
    last_norm: F32,
    head_weight: F32,
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
    layers, hidden = input_norms.shape
    kv_heads, size = v_pools.shape[2], v_pools.shape[3]
    residual = np.empty((1, hidden), np.float32)
    normed = np.empty((1, hidden), np.float32)
    added = np.empty((1, hidden), np.float32)
    qkv = np.empty((1, qkv_weights.shape[2]), np.float32)
    attended = np.empty((1, out_weights.shape[1]), np.float32)
    gate_up = np.empty(gate_up_weights.shape[2], np.float32)
    inner = down_weights.shape[1]
    logits = np.empty(head_weight.shape[1], np.float32)
    cos = np.empty((1, len(inverse_frequencies)), np.float32)
    sin = np.empty((1, len(inverse_frequencies)), np.float32)
    rows, table_of, context, slots = (
        np.zeros(1, np.int64),
        np.empty(1, np.int64),
        np.empty(1, np.int64),
        np.empty(1, np.int64),
    )
    for b in range(tables.shape[0]):
        start, given, window = places[b, 0], places[b, 1], places[b, 2]
        drafted, survival = 0, 1.0
        table_of[0] = b
        for step in range(given + window - 1):
            position = start + step
            token = known[b, step] if step < given else out[b, step - given]
            residual[0] = embedding[token]
            for d in range(len(inverse_frequencies)):
                angle = np.float32(position) * inverse_frequencies[d]
                cos[0, d] = np.cos(angle) * angle_scale
                sin[0, d] = np.sin(angle) * angle_scale
            context[0] = position + 1
            slots[0] = tables[b, position // size] * size + position % size
            added[:] = np.float32(0.0)
            for layer in range(layers):
                kernels.add_rms_norm(residual, added, input_norms[layer], eps, normed)
                _product(normed[0], qkv_weights[layer], qkv[0])
                kernels.rotate_and_store(qkv, heads, cos, sin, k_pools[layer], v_pools[layer], slots)
                kernels.attend(
                    qkv,
                    heads,
                    k_pools[layer],
                    v_pools[layer],
                    tables,
                    rows,
                    table_of,
                    context,
                    scale,
                    attended,
                    0,
                    kv_heads,
                )
                _product(attended[0], out_weights[layer], added[0])
                kernels.add_rms_norm(residual, added, mlp_norms[layer], eps, normed)
                _product(normed[0], gate_up_weights[layer], gate_up)
                for i in range(inner):
                    gate = gate_up[i]
                    gate_up[i] = gate / (np.float32(1.0) + np.exp(-gate)) * gate_up[inner + i]
                _product(gate_up[:inner], down_weights[layer], added[0])
            if step < given - 1:
                continue
            kernels.add_rms_norm(residual, added, last_norm, eps, normed)
            _product(normed[0], head_weight, logits)
            if sampling[b, 0] == 0.0:
                out[b, drafted], probability = _greedy(logits)
                survival *= probability
                if survival < least:
                    break
            else:
                out[b, drafted] = _drawn(
                    logits, sampling[b, 0], sampling[b, 1], int(sampling[b, 2]), chances[b, drafted]
                )
            drafted += 1
        counts[b] = drafted
