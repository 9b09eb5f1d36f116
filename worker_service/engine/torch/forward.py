"""The forward pass of Llama, Qwen 2 and Qwen 3 over paged KV.

It computes what transformers' modules compute, with a quarter of the calls: one product for queries, keys and values, one
for gate and up, no masks, no wrappers. The modules' weights become views of the fused ones, so that a model takes no more
memory. On a CPU in float32, norms, rotary positions and the writing of the KV are compiled, too.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

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


class _Product(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer. qkv: ((H + 2 Hkv) * D, hidden). gate_up: (2 * intermediate, hidden)."""

    input_norm: _Norm
    qkv: _Product
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: _Product
    mlp_norm: _Norm
    gate_up: _Product
    down: _Product


_Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (N, D / 2) of the rotary positions."""


class FusedForward:
    """Computes steps with fused weights."""

    def __init__(self, model: CausalModel, *, compiled: bool) -> None:
        """Fuse the weights of the model. compiled: use the compiled CPU kernels, in float32."""
        config, body = model.config, model.model
        self._embedding, self._rotary = body.embed_tokens.weight, body.rotary_emb
        self._inverse_frequencies = body.rotary_emb.inv_freq.float()
        self._heads = config.num_attention_heads
        self._scale = body.layers[0].self_attn.scaling
        self._ops = (_CompiledOps if compiled else _TorchOps)(self._heads, config.num_key_value_heads)
        self._layers = list(map(_fused, body.layers))
        self._norm = _norm(body.norm)

    @torch.inference_mode()
    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, paged: PagedBatch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """The last hidden states (N, hidden) of tokens (N,) at positions (N,), or of those in `rows` only."""
        ops, heads, linear, rotary = self._ops, self._heads, functional.linear, self._angles(positions)
        residual = functional.embedding(tokens, self._embedding)
        added = torch.zeros_like(residual)
        for index, layer in enumerate(self._layers):
            residual, hidden = ops.add_norm(residual, added, layer.input_norm)
            qkv = linear(hidden, *layer.qkv)
            stored = ops.place(qkv, layer, rotary, paged, index)
            attended = paged.attend(index, qkv, heads, self._scale, stored=stored)
            added = linear(attended, *layer.out)
            residual, hidden = ops.add_norm(residual, added, layer.mlp_norm)
            gate, up = linear(hidden, *layer.gate_up).chunk(2, dim=-1)
            added = linear(functional.silu(gate).mul_(up), *layer.down)
        if rows is not None:
            residual, added = residual[rows], added[rows]
        return ops.add_norm(residual, added, self._norm)[1]

    def _angles(self, positions: torch.Tensor) -> _Rotary:
        angles = positions.float()[:, None] * self._inverse_frequencies
        scaling, dtype = self._rotary.attention_scaling, self._embedding.dtype
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


class _TorchOps:
    """What lies between the matrix products, on any device and in any dtype, rounded as the modules round."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        self._heads, self._kv_heads = heads, kv_heads

    def add_norm(self, residual: torch.Tensor, added: torch.Tensor, norm: _Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and its norm."""
        residual = residual + added
        return residual, self._normed(residual, norm)

    def place(self, qkv: torch.Tensor, layer: _Layer, rotary: _Rotary, paged: PagedBatch, index: int) -> bool:
        """Apply the norms of heads and rotary positions to `qkv` in place; whether keys and values are in the pool now."""
        heads, kv_heads = self._heads, self._kv_heads
        every = qkv.unflatten(1, (heads + 2 * kv_heads, -1))[:, : heads + kv_heads]
        for part, norm in ((every[:, :heads], layer.query_norm), (every[:, heads:], layer.key_norm)):
            if norm is not None:
                part.copy_(self._normed(part, norm))
        low, high = every.chunk(2, dim=-1)
        cos, sin = (values[:, None] for values in rotary)
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

    def place(self, qkv: torch.Tensor, layer: _Layer, rotary: _Rotary, paged: PagedBatch, index: int) -> bool:
        numbers, heads, (cos, sin) = qkv.numpy(), self._heads, rotary
        if layer.query_norm is not None and layer.key_norm is not None:
            kernels.head_norm(numbers, 0, heads, layer.query_norm.array, layer.query_norm.eps)
            first_key = heads * paged.pool.head_dim
            kernels.head_norm(numbers, first_key, self._kv_heads, layer.key_norm.array, layer.key_norm.eps)
        kernels.rotate_and_store(numbers, heads, cos.numpy(), sin.numpy(), *paged.pool.arrays[index], paged.slots)
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
    qkv, out, gate_up, down = map(_joined, parts(layer))
    attention = layer.self_attn
    query_norm, key_norm = (
        _norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
    )
    return _Layer(
        input_norm=_norm(layer.input_layernorm),
        qkv=qkv,
        query_norm=query_norm,
        key_norm=key_norm,
        out=out,
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=down,
    )


def _joined(modules: tuple[Any, ...]) -> _Product:
    """Weight and bias of several products as those of one. The modules' own become views of them."""
    widths = [module.out_features for module in modules]

    def joined(name: str) -> torch.Tensor:
        whole = torch.cat([getattr(module, name).data for module in modules])
        for module, part in zip(modules, whole.split(widths), strict=True):
            getattr(module, name).data = part
        return whole

    return _Product(joined("weight"), joined("bias") if modules[0].bias is not None else None)
