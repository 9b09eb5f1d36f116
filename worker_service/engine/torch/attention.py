"""Paged attention over the tokens of a step.

The tokens of a step are one ragged row of N tokens: decodes and prompt chunks of many sequences. Queries, keys and values of
a layer are one tensor (N, (H + 2 Hkv) * D); keys and values are written into the paged pool, and attention is computed per
sequence.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock.worker_service.engine.torch import block_copies, kernels
from penstock.worker_service.engine.torch.step_layout import Segment, step_layout

KERNEL_TOKENS = 16
"""Up to this many tokens of a sequence use the compiled kernel next to torch's products."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
MIN_THREAD_WORK = 1 << 20
"""Multiply-adds of one layer's attention below which it runs in one thread: about as long as waking another one takes."""


class KvPool:
    """Keys and values of all layers, in blocks: k (blocks, Hkv, D, slots) and v (blocks, Hkv, slots, D) per layer."""

    def __init__(
        self, layers: int, blocks: int, block_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        self.layers, self.blocks, self.block_tokens = layers, blocks, block_tokens
        self.kv_heads, self.head_dim, self._elements = kv_heads, head_dim, block_tokens * kv_heads * head_dim
        # zeros, not empty: values beyond the end of a sequence are multiplied by weight 0 and must not be NaN
        keys = torch.zeros((layers, blocks, kv_heads, head_dim, block_tokens), dtype=dtype, device=device)
        values = torch.zeros((layers, blocks, kv_heads, block_tokens, head_dim), dtype=dtype, device=device)
        self.k, self.v = list(keys), list(values)
        self.stacked = (numbers(keys), numbers(values)) if device == "cpu" else None
        """The memory of all layers for the compiled draft; on a CPU only."""
        self.arrays = [(numbers(k), numbers(v)) for k, v in zip(self.k, self.v, strict=True)] if device == "cpu" else []
        """The same memory for the compiled kernels, per layer; on a CPU only."""

    def read(self, blocks: list[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """A copy: (blocks, layers, 2, elements), on the CPU; in `out` if it is given. Elements in the order of k and v."""
        if self.stacked is not None:
            if out is None:
                out = torch.empty((len(blocks), self.layers, 2, self._elements), dtype=self.k[0].dtype)
            block_copies.gather(*self._bits(), np.array(blocks, np.int64), self._moving(numbers(out)))
            return out
        at = torch.tensor(blocks, dtype=torch.long, device=self.k[0].device)
        layers = [torch.stack((k[at].flatten(1), v[at].flatten(1)), dim=1) for k, v in zip(self.k, self.v, strict=True)]
        data = torch.stack(layers, dim=1)
        return data.cpu() if out is None else out.copy_(data)

    def write(self, blocks: list[int], data: npt.NDArray[Any]) -> None:
        """Write blocks as they were read: bfloat16 as uint16. `data` may be read-only."""
        if self.stacked is not None:
            block_copies.scatter(*self._bits(), np.array(blocks, np.int64), self._moving(data))
            return
        at = torch.tensor(blocks, dtype=torch.long, device=self.k[0].device)
        tensor = torch.from_numpy(data if data.flags.writeable else data.copy()).view(self.k[0].dtype)
        tensor = tensor.to(self.k[0].device)
        for layer, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            k[at] = tensor[:, layer, 0].unflatten(1, k.shape[1:])
            v[at] = tensor[:, layer, 1].unflatten(1, v.shape[1:])

    def _bits(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Keys and values of all layers, each (layers, blocks, elements)."""
        assert self.stacked is not None
        keys, values = (block_copies.bits(array, self.layers, self.blocks, self._elements) for array in self.stacked)
        return keys, values

    def _moving(self, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return block_copies.bits(data, len(data), self.layers, 2, self._elements)


class KernelThreads:
    """Runs the work items of a kernel in several threads, of which the caller's is one."""

    def __init__(self, threads: int) -> None:
        self.count = threads
        self._pool = ThreadPoolExecutor(threads - 1, "attention") if threads > 1 else None

    def run(self, kernel: Callable[[int, int], None], cuts: list[int]) -> None:
        """Call `kernel(first, last)` for each two neighbours in `cuts`, and wait for all."""
        (own, *others) = pairwise(cuts)
        futures = [self._pool.submit(kernel, *part) for part in others] if self._pool is not None else []
        kernel(*own)
        for future in futures:
            future.result()


class PagedBatch:
    """The data for the attention of one step. `place` must be called before `attend`."""

    def __init__(
        self, pool: KvPool, segments: list[Segment], tables: npt.NDArray[np.int64], threads: KernelThreads | None
    ) -> None:
        """tables: (sequences, most blocks). threads: of the compiled CPU kernel, which computes segments of up to
        KERNEL_TOKENS; None: without it."""
        self.pool, self.tables, self._threads = pool, tables, threads
        self.positions, table_of, self.slots, self.runs = step_layout(segments, tables, pool.block_tokens)
        limit = KERNEL_TOKENS if threads is not None else 1
        self._long = [s for s in segments if s.count > limit]
        short = np.repeat([s.count <= limit for s in segments], [s.count for s in segments])
        self._rows, self._table_of, self._context = np.flatnonzero(short), table_of[short], self.positions[short] + 1
        if self._long:
            self.runs = step_layout([s for s in segments if s.count <= limit], tables, pool.block_tokens).runs
        self._cuts = self._parts(threads.count) if threads is not None else []

    @property
    def indices(self) -> list[npt.NDArray[np.int64]]:
        """What `place` needs on the device."""
        size = self.pool.block_tokens
        tables = [self.tables[s.table, : -(-(s.start + s.count) // size)] for s in self._long if s.start]
        if self._threads is not None:
            return tables
        most = -(-int(self._context.max(initial=0)) // size)
        return [self.slots, self._rows, self.tables[self._table_of, :most], self._context, *tables]

    def place(self, indices: list[torch.Tensor]) -> None:
        """Take the `indices` on the device, and make the masks, which are the same for all layers."""
        if self._threads is None:
            self._slots, self._decode_rows, self._decode_tables, lengths = indices[:4]
            places = torch.arange(self._decode_tables.shape[1] * self.pool.block_tokens, device=lengths.device)
            self._decode_mask = (places < lengths[:, None])[:, None, None, :]
            indices = indices[4:]
        self._cached = {}
        for segment, table in zip((s for s in self._long if s.start), indices, strict=True):
            places = torch.arange(segment.start + segment.count, device=table.device)
            self._cached[segment.first] = table, places[None, :] <= places[segment.start :, None]

    def attend(self, layer: int, qkv: torch.Tensor, heads: int, scale: float, *, stored: bool = False) -> torch.Tensor:
        """Queries, keys and values (N, (H + 2 Hkv) * D) of this step's tokens -> (N, H * D).

        stored: whether their keys and values are in the pool already; otherwise they are written to it.
        """
        out = torch.empty((qkv.shape[0], heads * self.pool.head_dim), dtype=qkv.dtype, device=qkv.device)
        if self._threads is not None:
            self._attend_with_kernel(layer, qkv, heads, scale, out, stored=stored)
        else:
            self._attend_with_gathered(layer, qkv, heads, scale, out)
        for segment in self._long:
            self._attend_to_segment(segment, layer, qkv, heads, scale, out)
        return out

    def _attend_with_kernel(
        self, layer: int, qkv: torch.Tensor, heads: int, scale: float, out: torch.Tensor, *, stored: bool
    ) -> None:
        """The short segments, by the compiled kernel."""
        k_pool, v_pool = self.pool.arrays[layer]
        if not stored:
            kernels.store(numbers(qkv), heads, k_pool, v_pool, self.slots)
        if not len(self._rows):
            return
        exact = qkv.dtype == torch.float32
        q = (qkv if exact else qkv[:, : out.shape[1]].float()).numpy()
        result = out if exact else torch.zeros(out.shape)
        pool = (k_pool, v_pool)
        where = kernels.Context(self.tables, self._rows, self.runs, self._table_of, self._context)

        def part(first: int, last: int) -> None:
            kernels.attend(q, heads, pool, where, scale, result.numpy(), first, last)

        assert self._threads is not None
        self._threads.run(part, self._cuts)
        if not exact:
            out.copy_(result)

    def _parts(self, threads: int) -> list[int]:
        """Where the work items of the kernel (runs of tokens by KV heads) are cut into parts of about equal work."""
        items = (len(self.runs) - 1) * self.pool.kv_heads
        if not items:
            return [0, 0]
        work = np.repeat(np.add.reduceat(self._context, self.runs[:-1]), self.pool.kv_heads).cumsum()
        if threads == 1 or work[-1] * self.pool.head_dim < MIN_THREAD_WORK:
            return [0, items]
        return [0, *(np.searchsorted(work, work[-1] * np.arange(1, threads) / threads) + 1).tolist(), items]

    def _attend_with_gathered(self, layer: int, qkv: torch.Tensor, heads: int, scale: float, out: torch.Tensor) -> None:
        """The decodes, over their keys and values gathered into one padded batch."""
        pool, k_pool, v_pool = self.pool, self.pool.k[layer], self.pool.v[layer]
        q, k, v = self._split(qkv, heads)
        block, place = self._slots // pool.block_tokens, self._slots % pool.block_tokens
        k_pool[block, :, :, place] = k
        v_pool[block, :, place] = v
        if not len(self._rows):
            return
        keys = k_pool[self._decode_tables].permute(0, 2, 1, 4, 3).flatten(2, 3)  # (B, Hkv, tokens, D)
        values = v_pool[self._decode_tables].permute(0, 2, 1, 3, 4).flatten(2, 3)
        queries, mask = q[self._decode_rows].unsqueeze(2), self._decode_mask
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        out[self._decode_rows] = output.squeeze(2).flatten(1)

    def _attend_to_segment(
        self, segment: Segment, layer: int, qkv: torch.Tensor, heads: int, scale: float, out: torch.Tensor
    ) -> None:
        """Fused attention for many tokens of one sequence, over cached and new tokens."""
        k_pool, v_pool = self.pool.k[layer], self.pool.v[layer]
        rows = slice(segment.first, segment.first + segment.count)
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in self._split(qkv[rows], heads))
        if segment.start == 0:
            output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        else:
            end = segment.start + segment.count
            table, mask = self._cached[segment.first]
            keys = k_pool[table].permute(1, 0, 3, 2).flatten(1, 2)[:, :end].unsqueeze(0)
            values = v_pool[table].permute(1, 0, 2, 3).flatten(1, 2)[:, :end].unsqueeze(0)
            output = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        out[rows] = output.squeeze(0).transpose(0, 1).flatten(1)

    def _split(self, qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
        """Views (N, H, D), (N, Hkv, D) and (N, Hkv, D)."""
        kv_heads = self.pool.kv_heads
        return qkv.unflatten(1, (heads + 2 * kv_heads, self.pool.head_dim)).split((heads, kv_heads, kv_heads), dim=1)


def numbers(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a CPU tensor as an array; bfloat16, which numpy does not have, as uint16."""
    array: npt.NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
