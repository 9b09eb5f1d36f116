"""The forward pass of few tokens by a small model, compiled as one function, without Python or torch between its operations.

A small model computes a token in less time than Python takes to call its operations, and torch's products of few rows take
longer than reading the weights once.
"""

from dataclasses import dataclass

import numba
import numpy as np
import torch

from worker_service.engine.torch import kernels
from worker_service.engine.torch.attention import KvPool, PagedBatch
from worker_service.engine.torch.forward import Weights
from worker_service.engine.torch.kernels import F32, I64
from worker_service.engine.torch.plain_model import CausalModel

MAX_PARAMETERS = 20_000_000
"""Larger models compute for longer than the calls of their operations take, so torch's products are the better choice."""
MAX_TOKENS = 16
"""Of a pass; from about 24 on torch's products are as fast (docs/engine.md)."""


def can_compile(model: CausalModel) -> bool:
    """Whether the pass suits a model that the fused one computes: small, in float32 on a CPU."""
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    return on_cpu and model.num_parameters() <= MAX_PARAMETERS


@dataclass(frozen=True, slots=True)
class Constants:
    """What every pass of a model is given. scale: of the attention's scores."""

    weights: Weights
    embedding: F32
    last_norm: F32
    inverse_frequencies: F32
    angle_scale: float
    eps: float
    scale: float
    heads: int


class CompiledForward:
    """The hidden states of few tokens, by the weights of a fused pass, which it shares."""

    def __init__(self, model: CausalModel, weights: Weights, pool: KvPool) -> None:
        """weights: of the layers of the model. pool: of its KV, in float32 on the CPU."""
        body, config = model.model, model.config
        assert pool.stacked is not None  # it is on the CPU
        self.kv, self.block_tokens = pool.stacked, pool.block_tokens
        self.constants = Constants(
            weights,
            body.embed_tokens.weight.data.numpy(),
            body.norm.weight.data.numpy(),
            body.rotary_emb.inv_freq.float().numpy(),
            float(body.rotary_emb.attention_scaling),
            float(config.rms_norm_eps),
            float(body.layers[0].self_attn.scaling),
            int(config.num_attention_heads),
        )
        self.head: F32 = model.lm_head.weight.data.numpy()

    def __call__(self, tokens: I64, paged: PagedBatch) -> F32:
        """The last hidden states (N, hidden) of tokens (N,), all of them in short segments."""
        constants = self.constants
        out = np.empty((len(tokens), constants.embedding.shape[1]), np.float32)
        forward(
            constants.weights,
            constants.embedding,
            constants.last_norm,
            constants.inverse_frequencies,
            constants.angle_scale,
            constants.eps,
            constants.scale,
            constants.heads,
            *self.kv,
            tokens,
            paged.positions,
            paged.tables,
            paged.table_of,
            paged.slots,
            out,
        )
        return out


@numba.njit(nogil=True, fastmath=True, cache=True)
def forward(
    weights: Weights,
    embedding: F32,
    last_norm: F32,
    inverse_frequencies: F32,
    angle_scale: float,
    eps: float,
    scale: float,
    heads: int,
    k_pools: F32,
    v_pools: F32,
    tokens: I64,
    positions: I64,
    tables: I64,
    table_of: I64,
    slots: I64,
    out: F32,
) -> None:
    """Write the last hidden states of N tokens to `out` (N, hidden), and their KV into the pools.

    k_pools (L, blocks, Hkv, D, slots), v_pools (L, blocks, Hkv, slots, D). tables, table_of, slots: as in `kernels.attend`.
    """
    qkv_weights, qkv_biases, out_weights, out_biases, gate_up_weights, gate_up_biases = weights[:6]
    down_weights, down_biases, query_norms, key_norms, input_norms, mlp_norms = weights[6:]
    count, hidden = out.shape
    layers, kv_heads, dim = k_pools.shape[0], k_pools.shape[2], k_pools.shape[3]
    residual, added = np.empty((count, hidden), np.float32), np.zeros((count, hidden), np.float32)
    qkv = np.empty((count, qkv_weights.shape[1]), np.float32)
    attended = np.empty((count, heads * dim), np.float32)
    gate_up = np.empty((count, gate_up_weights.shape[1]), np.float32)
    inner = np.empty((count, down_weights.shape[2]), np.float32)
    half = len(inverse_frequencies)
    cos, sin = np.empty((count, half), np.float32), np.empty((count, half), np.float32)
    rows, context = np.arange(count), positions + 1
    for n in range(count):
        residual[n] = embedding[tokens[n]]
        for d in range(half):
            angle = np.float32(positions[n]) * inverse_frequencies[d]
            cos[n, d] = np.cos(angle) * angle_scale
            sin[n, d] = np.sin(angle) * angle_scale
    for layer in range(layers):
        kernels.add_rms_norm(residual, added, input_norms[layer], eps, out)
        kernels.product(out, qkv_weights[layer], qkv_biases[layer], qkv)
        if query_norms.shape[1]:
            kernels.head_norm(qkv, 0, heads, query_norms[layer], eps)
            kernels.head_norm(qkv, heads * dim, kv_heads, key_norms[layer], eps)
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
            count * kv_heads,
        )
        kernels.product(attended, out_weights[layer], out_biases[layer], added)
        kernels.add_rms_norm(residual, added, mlp_norms[layer], eps, out)
        kernels.product(out, gate_up_weights[layer], gate_up_biases[layer], gate_up)
        kernels.gated(gate_up, inner)
        kernels.product(inner, down_weights[layer], down_biases[layer], added)
    kernels.add_rms_norm(residual, added, last_norm, eps, out)
