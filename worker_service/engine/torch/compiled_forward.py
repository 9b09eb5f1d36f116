"""The forward pass of a small model, compiled as one function, without Python or torch between its operations.

A small model computes a token in less time than Python takes to call its operations, and torch's products of few rows take
longer than reading the weights once. One implementation computes prompts, decodes and verified drafts, and a token's result
is the same, bit by bit, however the tokens are spread over passes.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from services import tiles
from services.tiles import F32
from worker_service.engine.torch import kernels
from worker_service.engine.torch.attention import KvPool
from worker_service.engine.torch.forward import parts
from worker_service.engine.torch.kernels import I64
from worker_service.engine.torch.plain_model import CausalModel
from worker_service.engine.torch.step_layout import StepLayout

Weights = tuple[F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32, F32]
"""Of all layers, each with the layer as its first axis, (L, 0) where a model has none: panels and biases of queries, keys
and values, of the output, of gate and up, and of down; then the norms of queries, keys, attention and MLP."""


_NONE = np.empty(0, np.float32)


def can_compile(model: CausalModel) -> bool:
    """Whether the pass suits a model that the fused one computes: small, in float32 on a CPU."""
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    return on_cpu and model.num_parameters() <= tiles.MAX_PARAMETERS


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
    """The hidden states of a model."""

    def __init__(self, model: CausalModel, pool: KvPool) -> None:
        """Take over the products of the model's layers, whose modules are empty then. pool: of its KV, float32 on the CPU."""
        body, config = model.model, model.config
        assert pool.stacked is not None  # it is on the CPU
        self.kv, self.block_tokens = pool.stacked, pool.block_tokens
        self.constants = Constants(
            _taken(body.layers),
            body.embed_tokens.weight.data.numpy(),
            body.norm.weight.data.numpy(),
            body.rotary_emb.inv_freq.float().numpy(),
            float(body.rotary_emb.attention_scaling),
            float(config.rms_norm_eps),
            float(body.layers[0].self_attn.scaling),
            int(config.num_attention_heads),
        )
        self.head = tiles.panels(model.lm_head.weight.data.numpy())
        self._vocab_size = len(model.lm_head.weight)

    def logits(self, hidden: F32) -> F32:
        """(N, V) of last hidden states (N, hidden)."""
        out = np.empty((len(hidden), self._vocab_size), np.float32)
        tiles.product(hidden, self.head, _NONE, out)
        return out

    def __call__(self, tokens: I64, layout: StepLayout, tables: I64) -> F32:
        """The last hidden states (N, hidden) of tokens (N). tables: the block tables (rows, most blocks) of the layout."""
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
            layout.positions,
            tables,
            layout.runs,
            layout.table_of,
            layout.slots,
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
    runs: I64,
    table_of: I64,
    slots: I64,
    out: F32,
) -> None:
    """Write the last hidden states of N tokens to `out` (N, hidden), and their KV into the pools.

    k_pools (L, blocks, Hkv, D, slots), v_pools (L, blocks, Hkv, slots, D). tables, runs, table_of, slots: as in
    `kernels.attend`.
    """
    qkv_weights, qkv_biases, out_weights, out_biases, gate_up_weights, gate_up_biases = weights[:6]
    down_weights, down_biases, query_norms, key_norms, input_norms, mlp_norms = weights[6:]
    count, hidden = out.shape
    layers, kv_heads, dim = k_pools.shape[0], k_pools.shape[2], k_pools.shape[3]
    residual, added = np.empty((count, hidden), np.float32), np.zeros((count, hidden), np.float32)
    qkv = np.empty((count, (heads + 2 * kv_heads) * dim), np.float32)
    attended = np.empty((count, heads * dim), np.float32)
    inner = np.empty((count, down_weights.shape[2]), np.float32)
    gate_up = np.empty((count, 2 * inner.shape[1]), np.float32)
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
        tiles.product(out, qkv_weights[layer], qkv_biases[layer], qkv)
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
            runs,
            table_of,
            context,
            scale,
            attended,
            0,
            (len(runs) - 1) * kv_heads,
        )
        tiles.product(attended, out_weights[layer], out_biases[layer], added)
        kernels.add_rms_norm(residual, added, mlp_norms[layer], eps, out)
        tiles.product(out, gate_up_weights[layer], gate_up_biases[layer], gate_up)
        kernels.gated(gate_up, inner)
        tiles.product(inner, down_weights[layer], down_biases[layer], added)
    kernels.add_rms_norm(residual, added, last_norm, eps, out)


def _taken(layers: Any) -> Weights:
    """The weights of the layers, whose products are released."""
    products = list[F32]()
    for modules in zip(*map(parts, layers), strict=True):  # of one part in all layers
        joined = [torch.cat([module.weight.data for module in of_layer]).numpy() for of_layer in modules]
        products.append(np.stack([tiles.panels(weight) for weight in joined]))
        biases = [[module.bias.data for module in of_layer if module.bias is not None] for of_layer in modules]
        products.append(np.stack([torch.cat(of_layer).numpy() if of_layer else _NONE for of_layer in biases]))
        for module in itertools.chain.from_iterable(modules):
            module.weight.data = torch.empty(0)
    (qkv, qkv_biases, out, out_biases, gate_up, gate_up_biases, down, down_biases) = products
    return (
        *(qkv, qkv_biases, out, out_biases, gate_up, gate_up_biases, down, down_biases),
        _norms([getattr(layer.self_attn, "q_norm", None) for layer in layers]),
        _norms([getattr(layer.self_attn, "k_norm", None) for layer in layers]),
        _norms([layer.input_layernorm for layer in layers]),
        _norms([layer.post_attention_layernorm for layer in layers]),
    )


def _norms(modules: list[Any]) -> F32:
    """The weights (L, width) of a norm in all layers; (L, 0) of none."""
    return np.stack([_NONE if module is None else module.weight.data.numpy() for module in modules])
