"""The forward pass of Llama, Qwen 2 and Qwen 3 over paged KV.

It computes what transformers' modules compute, with a quarter of the calls: one product for queries, keys and values, one
for gate and up, no masks, no wrappers. The modules' weights become views of the fused ones, so that a model takes no more
memory. On a CPU in float32, norms, rotary positions and the writing of the KV are compiled, too.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from penstock.worker_service.engine.torch import kernels
from penstock.worker_service.engine.torch.attention import PagedBatch
from penstock.worker_service.engine.torch.plain_model import CausalModel


@dataclass(frozen=True, slots=True)
class _Norm:
    """An RMS norm. array: the weight's memory for the compiled kernels."""

    weight: torch.Tensor
    array: npt.NDArray[np.float32]
    eps: float


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer. qkv: ((H + 2 Hkv) * D, hidden). gate_up: (2 * intermediate, hidden)."""

    input_norm: _Norm
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: _Norm
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class FusedForward:
    """Computes steps with fused weights."""

    def __init__(self, model: CausalModel, *, compiled: bool) -> None:
        """Fuse the weights of the model. compiled: use the compiled CPU kernels, in float32."""
        config, body = model.config, model.model
        self._embedding, self._rotary = body.embed_tokens.weight, body.rotary_emb
        self._inverse_frequencies = body.rotary_emb.inv_freq.float()
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._scale = body.layers[0].self_attn.scaling
        self._ops: _TorchOps = _CompiledOps() if compiled else _TorchOps()
        self._layers = list(map(_fused, body.layers))
        self._norm = _norm(body.norm)

    @torch.inference_mode()
    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, paged: PagedBatch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """The last hidden states (N, hidden) of tokens (N,) at positions (N,), or of those in `rows` only."""
        ops, heads, linear = self._ops, self._heads, functional.linear
        cos, sin = self._angles(positions)
        residual = functional.embedding(tokens, self._embedding)
        added = torch.zeros_like(residual)
        for index, layer in enumerate(self._layers):
            residual, hidden = ops.add_norm(residual, added, layer.input_norm)
            qkv = linear(hidden, layer.qkv, layer.qkv_bias)
            stored = ops.place(qkv, layer, heads, self._kv_heads, cos, sin, paged, index)
            attended = paged.attend(index, qkv, heads, self._scale, stored=stored)
            added = linear(attended, layer.out, layer.out_bias)
            residual, hidden = ops.add_norm(residual, added, layer.mlp_norm)
            gate, up = linear(hidden, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            added = linear(functional.silu(gate).mul_(up), layer.down, layer.down_bias)
        if rows is not None:
            residual, added = residual[rows], added[rows]
        return ops.add_norm(residual, added, self._norm)[1]

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (N, D / 2) of the rotary positions."""
        angles = positions.float()[:, None] * self._inverse_frequencies
        scaling, dtype = self._rotary.attention_scaling, self._embedding.dtype
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


class _TorchOps:
    """What lies between the matrix products, on any device and in any dtype, rounded as the modules round."""

    def add_norm(self, residual: torch.Tensor, added: torch.Tensor, norm: _Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and its norm."""
        residual = residual + added
        return residual, self._normed(residual, norm)

    def place(
        self,
        qkv: torch.Tensor,
        layer: _Layer,
        heads: int,
        kv_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        paged: PagedBatch,
        index: int,
    ) -> bool:
        """Apply the norms of heads and rotary positions to `qkv` in place; whether keys and values are in the pool now."""
        every = qkv.unflatten(1, (heads + 2 * kv_heads, -1))[:, : heads + kv_heads]
        for part, norm in ((every[:, :heads], layer.query_norm), (every[:, heads:], layer.key_norm)):
            if norm is not None:
                part.copy_(self._normed(part, norm))
        low, high = every.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        low_rotated, high_rotated = low * cos - high * sin, high * cos + low * sin
        low.copy_(low_rotated)
        high.copy_(high_rotated)
        return False

    @staticmethod
    def _normed(x: torch.Tensor, norm: _Norm) -> torch.Tensor:
        precise = x.float()
        return norm.weight * (precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + norm.eps)).to(x.dtype)


class _CompiledOps(_TorchOps):
    """The same by compiled kernels, on a CPU in float32."""

    def add_norm(self, residual: torch.Tensor, added: torch.Tensor, norm: _Norm) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(residual)
        kernels.add_rms_norm(residual.numpy(), added.numpy(), norm.array, norm.eps, out.numpy())
        return residual, out

    def place(
        self,
        qkv: torch.Tensor,
        layer: _Layer,
        heads: int,
        kv_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        paged: PagedBatch,
        index: int,
    ) -> bool:
        numbers, k_pool_v_pool = qkv.numpy(), paged.pool.arrays[index]
        if layer.query_norm is not None and layer.key_norm is not None:
            kernels.head_norm(numbers, 0, heads, layer.query_norm.array, layer.query_norm.eps)
            first_key = heads * paged.pool.head_dim
            kernels.head_norm(numbers, first_key, kv_heads, layer.key_norm.array, layer.key_norm.eps)
        kernels.rotate_and_store(numbers, heads, cos.numpy(), sin.numpy(), *k_pool_v_pool, paged.slots)
        return True


def _norm(module: Any) -> _Norm:
    weight: torch.Tensor = module.weight.data
    on_cpu = weight.device.type == "cpu"
    array = weight.float().numpy() if on_cpu else np.empty(0, np.float32)
    return _Norm(weight, array, float(module.variance_epsilon))


def parts(layer: Any) -> tuple[tuple[Any, ...], ...]:
    """The products of a layer that are computed as one."""
    attention, mlp = layer.self_attn, layer.mlp
    queries = (attention.q_proj, attention.k_proj, attention.v_proj)
    return queries, (attention.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)


def _fused(layer: Any) -> _Layer:
    (qkv, qkv_bias), (out, out_bias), (gate_up, gate_up_bias), (down, down_bias) = map(_joined, parts(layer))
    attention = layer.self_attn
    has_head_norms = hasattr(attention, "q_norm")
    return _Layer(
        input_norm=_norm(layer.input_layernorm),
        qkv=qkv,
        qkv_bias=qkv_bias,
        query_norm=_norm(attention.q_norm) if has_head_norms else None,
        key_norm=_norm(attention.k_norm) if has_head_norms else None,
        out=out,
        out_bias=out_bias,
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
    )


def _joined(modules: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of several products as those of one. The modules' own become views of them."""
    widths = [module.out_features for module in modules]
    weight = torch.cat([module.weight.data for module in modules])
    for module, part in zip(modules, weight.split(widths), strict=True):
        module.weight.data = part
    if modules[0].bias is None:
        return weight, None
    bias = torch.cat([module.bias.data for module in modules])
    for module, part in zip(modules, bias.split(widths), strict=True):
        module.bias.data = part
    return weight, bias
