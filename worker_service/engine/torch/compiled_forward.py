"""The forward pass of a model in float32 on one thread, compiled as one function, without Python or torch in between.

A small model computes a token in less time than Python takes to call its operations, and torch's products of few rows take
longer than reading the weights once, whatever the size. One implementation computes prompts, decodes and verified drafts, and
a token's result is the same, bit by bit, however the tokens are spread over passes.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.services import tiles
from penstock.services.compilation import compiled
from penstock.services.tiles import F32
from penstock.worker_service.engine.torch import kernels
from penstock.worker_service.engine.torch.attention import KvPool
from penstock.worker_service.engine.torch.forward import parts
from penstock.worker_service.engine.torch.kernels import I64
from penstock.worker_service.engine.torch.plain_model import CausalModel
from penstock.worker_service.engine.torch.step_layout import StepLayout


class Weights(NamedTuple):
    """Of all layers, each with the layer as its first axis, (L, 0) where a model has none: panels and biases of products,
    then the weights of norms."""

    qkv: F32
    qkv_bias: F32
    out: F32
    out_bias: F32
    gate_up: F32
    gate_up_bias: F32
    down: F32
    down_bias: F32
    query_norm: F32
    key_norm: F32
    input_norm: F32
    mlp_norm: F32


_NONE = np.empty(0, np.float32)


def can_compile(model: CausalModel) -> bool:
    """Whether the pass suits a model that the fused one computes: in float32 on a CPU."""
    return model.device.type == "cpu" and model.dtype == torch.float32


class Constants(NamedTuple):
    """What every pass of a model is given. embedding: `panels`, of `vocab` tokens. scale: of the attention's scores."""

    weights: Weights
    embedding: F32
    vocab: int
    last_norm: F32
    inverse_frequencies: F32
    angle_scale: float
    eps: float
    scale: float
    heads: int


class CompiledForward:
    """The hidden states of a model."""

    def __init__(self, model: CausalModel, pool: KvPool) -> None:
        """Take over the model's weights; the modules of its products are empty then. pool: of its KV, float32 on the CPU."""
        body, config = model.model, model.config
        embedding, head = body.embed_tokens.weight, model.lm_head.weight
        vocab = len(head)
        assert pool.stacked is not None  # it is on the CPU
        self.kv, self.block_tokens = pool.stacked, pool.block_tokens
        weights = _taken(body.layers)
        self.head = _released(head)
        self.constants = Constants(
            weights,
            self.head if embedding is head else _released(embedding),
            vocab,
            body.norm.weight.data.numpy(),
            body.rotary_emb.inv_freq.float().numpy(),
            float(body.rotary_emb.attention_scaling),
            float(config.rms_norm_eps),
            float(body.layers[0].self_attn.scaling),
            int(config.num_attention_heads),
        )

    def logits(self, hidden: F32) -> F32:
        """(N, V) of last hidden states (N, hidden)."""
        out = np.empty((len(hidden), self.constants.vocab), np.float32)
        tiles.product(hidden, self.head, _NONE, out)
        return out

    def __call__(self, tokens: I64, layout: StepLayout, tables: I64) -> F32:
        """The last hidden states (N, hidden) of tokens (N). tables: the block tables (rows, most blocks) of the layout."""
        out = np.empty((len(tokens), self.constants.embedding.shape[1]), np.float32)
        forward(self.constants, self.kv, tokens, layout, tables, out)
        return out


@compiled(fastmath=True)
def forward(model: Constants, kv: tuple[F32, F32], tokens: I64, layout: StepLayout, tables: I64, out: F32) -> None:
    """Write the last hidden states of N tokens to `out` (N, hidden), and their KV into the pools.

    kv: keys (L, blocks, Hkv, D, slots) and values (L, blocks, Hkv, slots, D). tables: as in `kernels.Context`. For each
    layer, with h the residual,

        h += out(attention(rotate(qkv(norm(h))))),    h += down(silu(gate(norm(h))) up(norm(h))).

    The same in PyTorch: `forward.FusedForward`.
    """
    weights, heads, eps, inverse_frequencies = model.weights, model.heads, model.eps, model.inverse_frequencies
    positions, (k_pools, v_pools) = layout.positions, kv
    count, hidden = out.shape
    layers, kv_heads, dim = k_pools.shape[0], k_pools.shape[2], k_pools.shape[3]
    residual, added = np.empty((count, hidden), np.float32), np.zeros((count, hidden), np.float32)
    qkv = np.empty((count, (heads + 2 * kv_heads) * dim), np.float32)
    attended = np.empty((count, heads * dim), np.float32)
    inner = np.empty((count, weights.down.shape[2]), np.float32)
    gate_up = np.empty((count, 2 * inner.shape[1]), np.float32)
    half = len(inverse_frequencies)
    cos, sin = np.empty((count, half), np.float32), np.empty((count, half), np.float32)
    where = kernels.Context(tables, np.arange(count), layout.runs, layout.table_of, positions + 1)
    items = (len(layout.runs) - 1) * kv_heads
    for n in range(count):
        panel, lane = divmod(tokens[n], tiles.PANEL)
        residual[n] = model.embedding[panel, :, lane]
        for d in range(half):
            angle = np.float32(positions[n]) * inverse_frequencies[d]
            cos[n, d] = np.cos(angle) * model.angle_scale
            sin[n, d] = np.sin(angle) * model.angle_scale
    for layer in range(layers):
        kernels.add_rms_norm(residual, added, weights.input_norm[layer], eps, out)
        tiles.product(out, weights.qkv[layer], weights.qkv_bias[layer], qkv)
        if weights.query_norm.shape[1]:
            kernels.head_norm(qkv, 0, heads, weights.query_norm[layer], eps)
            kernels.head_norm(qkv, heads * dim, kv_heads, weights.key_norm[layer], eps)
        kernels.rotate_and_store(qkv, heads, cos, sin, k_pools[layer], v_pools[layer], layout.slots)
        pool = (k_pools[layer], v_pools[layer])
        kernels.attend(qkv, heads, pool, where, model.scale, attended, 0, items)
        tiles.product(attended, weights.out[layer], weights.out_bias[layer], added)
        kernels.add_rms_norm(residual, added, weights.mlp_norm[layer], eps, out)
        tiles.product(out, weights.gate_up[layer], weights.gate_up_bias[layer], gate_up)
        kernels.gated(gate_up, inner)
        tiles.product(inner, weights.down[layer], weights.down_bias[layer], added)
    kernels.add_rms_norm(residual, added, model.last_norm, eps, out)


def _taken(layers: Any) -> Weights:
    """The weights of the layers, whose products are released."""
    products = list[F32]()
    for modules in zip(*map(parts, layers), strict=True):  # of one part in all layers
        outputs, inputs = sum(module.weight.shape[0] for module in modules[0]), modules[0][0].weight.shape[1]
        joined = np.empty((len(modules), -(-outputs // tiles.PANEL), inputs, tiles.PANEL), np.float32)
        for of_layer, panels in zip(modules, joined, strict=True):
            tiles.fill_panels([module.weight.data.numpy() for module in of_layer], panels)
            for module in of_layer:  # so that no more than a layer is there twice
                module.weight.data = torch.empty(0)
        products.append(joined)
        biases = [[module.bias.data for module in of_layer if module.bias is not None] for of_layer in modules]
        products.append(np.stack([torch.cat(of_layer).numpy() if of_layer else _NONE for of_layer in biases]))
    norms = [
        _norms([getattr(layer.self_attn, "q_norm", None) for layer in layers]),
        _norms([getattr(layer.self_attn, "k_norm", None) for layer in layers]),
        _norms([layer.input_layernorm for layer in layers]),
        _norms([layer.post_attention_layernorm for layer in layers]),
    ]
    return Weights(*products, *norms)


def _released(weight: torch.nn.Parameter) -> F32:
    """The panels of a weight, which is empty then."""
    panels = tiles.panels(weight.data.numpy())
    weight.data = torch.empty(0)
    return panels


def _norms(modules: list[Any]) -> F32:
    """The weights (L, width) of a norm in all layers; (L, 0) of none."""
    return np.stack([_NONE if module is None else module.weight.data.numpy() for module in modules])
