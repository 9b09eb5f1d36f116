"""Paged attention behind transformers' attention interface.

The tokens of a step are one ragged row (1, N) of decodes and prompt chunks of many sequences. The model code of transformers
passes q, k and v of each layer; k and v are written into the paged pool, and attention is computed per sequence.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from worker_service.engine.torch import kernels

NAME = "penstock_paged"
KERNEL_TOKENS = 8  # up to this many tokens of a sequence use the compiled kernel one by one; measured break-even


@dataclass(slots=True)
class Segment:
    """Tokens of one sequence in a step: rows `first` to `first + count` of the ragged batch, positions from `start` on."""

    first: int
    count: int
    start: int
    table: int


class KvPool:
    """Keys and values of all layers, in blocks: k (blocks, Hkv, D, slots) and v (blocks, Hkv, slots, D) per layer."""

    def __init__(
        self, layers: int, blocks: int, block_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        self.layers, self.blocks, self.block_tokens = layers, blocks, block_tokens
        self.k = [
            torch.zeros((blocks, kv_heads, head_dim, block_tokens), dtype=dtype, device=device) for _ in range(layers)
        ]
        self.v = [
            torch.zeros((blocks, kv_heads, block_tokens, head_dim), dtype=dtype, device=device) for _ in range(layers)
        ]
        # zeros, not empty: values beyond the end of a sequence are multiplied by weight 0 and must not be NaN

    def read(self, blocks: list[int]) -> torch.Tensor:
        """A copy: (blocks, layers, 2, block_tokens, Hkv, D), on the CPU."""
        at = torch.tensor(blocks, dtype=torch.long, device=self.k[0].device)
        layers = [
            torch.stack((k[at].permute(0, 3, 1, 2), v[at].permute(0, 2, 1, 3)), dim=1)
            for k, v in zip(self.k, self.v, strict=True)
        ]
        return torch.stack(layers, dim=1).cpu()

    def write(self, blocks: list[int], data: torch.Tensor) -> None:
        at = torch.tensor(blocks, dtype=torch.long, device=self.k[0].device)
        data = data.to(self.k[0].device)
        for layer, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            k[at] = data[:, layer, 0].permute(0, 2, 3, 1)
            v[at] = data[:, layer, 1].permute(0, 2, 1, 3)


class PagedBatch:
    """The data for the attention of one step, passed through the model as a keyword argument."""

    def __init__(self, pool: KvPool, segments: list[Segment], tables: np.ndarray, *, kernel: bool) -> None:
        """tables: (sequences, largest number of blocks) int64. kernel: use the compiled CPU kernel for short segments."""
        self.pool, self._tables = pool, tables
        size, device = pool.block_tokens, pool.k[0].device
        self._short = [s for s in segments if s.count <= KERNEL_TOKENS] if kernel else []
        self._decode = [] if kernel else [s for s in segments if s.count == 1]
        alone = {id(s) for s in (*self._short, *self._decode)}
        self._long = [s for s in segments if id(s) not in alone]
        slots = [
            tables[s.table, positions // size] * size + positions % size
            for s in segments
            for positions in (np.arange(s.start, s.start + s.count),)
        ]
        self.slots = np.concatenate(slots)
        self._slots_on_device = torch.from_numpy(self.slots).to(device)
        self.rows = np.concatenate(
            [np.arange(s.first, s.first + s.count) for s in self._short] or [np.empty(0, np.int64)]
        )
        self.table_of = np.repeat([s.table for s in self._short], [s.count for s in self._short]).astype(np.int64)
        self.context = np.concatenate(
            [np.arange(s.start + 1, s.start + s.count + 1) for s in self._short] or [np.empty(0, np.int64)]
        )
        self.all_short = len(self._short) == len(segments)
        self._kernel = kernel
        if self._decode:
            most = max(-(-(s.start + 1) // size) for s in self._decode)
            self._decode_rows = torch.tensor([s.first for s in self._decode], device=device)
            self._decode_tables = torch.from_numpy(tables[[s.table for s in self._decode], :most]).to(device)
            lengths = torch.tensor([s.start + 1 for s in self._decode], device=device)
            self._decode_mask = (torch.arange(most * size, device=device) < lengths[:, None])[:, None, None, :]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Q (N, H, D), k and v (N, Hkv, D) of this step's tokens -> (N, H, D); k and v are written to the pool."""
        pool_k, pool_v = self.pool.k[layer], self.pool.v[layer]
        if self._kernel:
            return self._attend_on_cpu(layer, q, k, v, scale)
        size = self.pool.block_tokens
        block, place = self._slots_on_device // size, self._slots_on_device % size
        pool_k[block, :, :, place] = k
        pool_v[block, :, place] = v
        out = torch.empty_like(q)
        if self._decode:
            tables = self._decode_tables
            shape = (len(self._decode), tables.shape[1] * size)
            keys = pool_k[tables].permute(0, 2, 1, 4, 3).flatten(2, 3)  # (B, Hkv, tokens, D)
            values = pool_v[tables].permute(0, 2, 1, 3, 4).flatten(2, 3)
            assert keys.shape[2] == shape[1]
            output = scaled_dot_product_attention(
                q[self._decode_rows].unsqueeze(2),
                keys,
                values,
                attn_mask=self._decode_mask,
                scale=scale,
                enable_gqa=True,
            )
            out[self._decode_rows] = output.squeeze(2)
        for segment in self._long:
            self._attend_to_segment(segment, pool_k, pool_v, q, k, v, scale, out)
        return out

    def _attend_on_cpu(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        pool_k, pool_v = self.pool.k[layer], self.pool.v[layer]
        k_array, v_array = pool_k.numpy(), pool_v.numpy()
        kernels.store(k.numpy(), v.numpy(), k_array, v_array, self.slots)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self.all_short:
            kernels.attend(
                q.contiguous().numpy(), k_array, v_array, self._tables, self.table_of, self.context, scale, out.numpy()
            )
            return out
        if self._short:
            part = np.empty((len(self.rows), *q.shape[1:]), np.float32)
            rows = torch.from_numpy(self.rows)
            kernels.attend(q[rows].numpy(), k_array, v_array, self._tables, self.table_of, self.context, scale, part)
            out[rows] = torch.from_numpy(part)
        for segment in self._long:
            self._attend_to_segment(segment, pool_k, pool_v, q, k, v, scale, out)
        return out

    def _attend_to_segment(
        self,
        segment: Segment,
        pool_k: torch.Tensor,
        pool_v: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Fused attention for many tokens of one sequence, over cached and new tokens."""
        rows = slice(segment.first, segment.first + segment.count)
        query = q[rows].transpose(0, 1).unsqueeze(0)
        if segment.start == 0:
            keys, values = k[rows].transpose(0, 1).unsqueeze(0), v[rows].transpose(0, 1).unsqueeze(0)
            output = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        else:
            end = segment.start + segment.count
            table = torch.from_numpy(self._tables[segment.table, : -(-end // self.pool.block_tokens)]).to(pool_k.device)
            keys = pool_k[table].permute(1, 0, 3, 2).flatten(1, 2)[:, :end].unsqueeze(0)
            values = pool_v[table].permute(1, 0, 2, 3).flatten(1, 2)[:, :end].unsqueeze(0)
            places = torch.arange(end, device=pool_k.device)
            mask = places[None, :] <= places[segment.start :, None]
            output = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        out[rows] = output.squeeze(0).transpose(0, 1)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 -- ours is causal, by position
    *,
    scaling: float,
    paged: PagedBatch,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Called by transformers in every layer: q (1, H, N, D), k and v (1, Hkv, N, D)."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return paged.attend(layer, q, k, v, scaling).unsqueeze(0), None


AttentionInterface.register(NAME, _paged_attention)
