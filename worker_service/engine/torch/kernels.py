"""CPU kernels of the built-in engine, compiled by numba and cached on disk. They release the GIL.

The KV layouts are chosen for vector registers: with keys as (block, kv_head, dim, slot), the scores of a block are `dim`
multiply-adds over all slots at once; with values as (block, kv_head, slot, dim), the output is one multiply-add over `dim`
per slot. Each key and value is read from memory once for all query heads that share it (GQA). Pools hold float32, or
bfloat16 as uint16; all arithmetic is in float32. Measured against gathering blocks and calling torch's SDPA: see
docs/explanation/engine.md.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba.extending import overload

from penstock.services.compilation import compiled
from penstock.services.tiles import F32, Product, add_product

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Kv = npt.NDArray[np.float32] | npt.NDArray[np.uint16]

_LOG2_E = np.float32(1.4426950408889634)
_EXPONENT_BIAS = np.int32(127)  # of float32, whose exponent begins at this bit:
_EXPONENT_BIT = np.int32(23)


@compiled(fastmath=True)
def add_rms_norm(x: F32, added: F32, weight: F32, eps: float, out: F32) -> None:
    """Add `added` to `x` in place, and write the RMS norm of the sum to `out`; all (N, hidden), weight (hidden,)."""
    rows, width = x.shape
    for n in range(rows):
        squares = np.float32(0.0)
        for i in range(width):
            value = x[n, i] + added[n, i]
            x[n, i] = value
            squares += value * value
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(width) + np.float32(eps))
        for i in range(width):
            out[n, i] = weight[i] * (x[n, i] * factor)


@compiled(fastmath=True)
def head_norm(qkv: F32, first: int, heads: int, weight: F32, eps: float) -> None:
    """RMS norm in place of `heads` heads of (N, width) from column `first` on; weight (D,)."""
    dim = weight.shape[0]
    for n in range(qkv.shape[0]):
        for h in range(heads):
            at = first + h * dim
            squares = np.float32(0.0)
            for d in range(dim):
                squares += qkv[n, at + d] * qkv[n, at + d]
            factor = np.float32(1.0) / np.sqrt(squares / np.float32(dim) + np.float32(eps))
            for d in range(dim):
                qkv[n, at + d] = weight[d] * (qkv[n, at + d] * factor)


@compiled()
def store(qkv: Kv, heads: int, k_pool: Kv, v_pool: Kv, slots: I64) -> None:
    """Write the keys and values of N tokens into the pools, `slots`: block * block_tokens + position in the block.

    qkv: (N, (H + 2 Hkv) * D).
    """
    kv_heads, dim, size = k_pool.shape[1], k_pool.shape[2], k_pool.shape[3]
    for n in range(qkv.shape[0]):
        block, place = slots[n] // size, slots[n] % size
        for h in range(kv_heads):
            key, value = (heads + h) * dim, (heads + kv_heads + h) * dim
            for d in range(dim):
                k_pool[block, h, d, place] = qkv[n, key + d]
            for d in range(dim):
                v_pool[block, h, place, d] = qkv[n, value + d]


@compiled(fastmath=True)
def rotate_and_store(qkv: F32, heads: int, cos: F32, sin: F32, k_pool: F32, v_pool: F32, slots: I64) -> None:
    """Apply rotary positions in place to the queries and keys of N tokens, and write keys and values into the pools.

    qkv: (N, (H + 2 Hkv) * D). cos, sin: (N, D / 2). slots: as in `store`.
    """
    kv_heads, dim = k_pool.shape[1], k_pool.shape[2]
    half = dim // 2
    for n in range(qkv.shape[0]):
        for h in range(heads + kv_heads):
            at = h * dim
            for d in range(half):
                low, high = qkv[n, at + d], qkv[n, at + half + d]
                qkv[n, at + d] = low * cos[n, d] - high * sin[n, d]
                qkv[n, at + half + d] = high * cos[n, d] + low * sin[n, d]
    store(qkv, heads, k_pool, v_pool, slots)


def _as_float32(block: Any, numbers: Any, bits: Any) -> Any:
    """A block as float32: itself, or bfloat16 widened into `numbers`, whose memory is also `bits`."""
    raise NotImplementedError  # compiled only


@overload(_as_float32)
def _as_float32_compiled(block: Any, numbers: Any, bits: Any) -> Any:  # noqa: ARG001 -- numba compares the names
    if block.dtype == numba.uint16:

        def widened(block: Any, numbers: Any, bits: Any) -> Any:
            for i in range(block.shape[0]):
                for j in range(block.shape[1]):
                    bits[i, j] = np.uint32(block[i, j]) << np.uint32(16)
            return numbers

        return widened

    def unchanged(block: Any, numbers: Any, bits: Any) -> Any:  # noqa: ARG001
        return block

    return unchanged


@compiled(fastmath=True)
def _power_of_two(part: np.float32) -> np.float32:
    """2^part of a part from 0 to 1, by a polynomial. exp(x) is that times 2^whole, which goes into the exponent's bits."""
    y = np.float32(1.5403530e-4)
    y = y * part + np.float32(1.3333558e-3)
    y = y * part + np.float32(9.6181291e-3)
    y = y * part + np.float32(5.5504109e-2)
    y = y * part + np.float32(2.4022651e-1)
    y = y * part + np.float32(6.9314718e-1)
    return y * part + np.float32(1.0)


@compiled(fastmath=True)
def gated(gate_up: F32, out: F32) -> None:
    """Write silu(gate) * up to `out` (N, inner); gate_up: (N, 2 * inner)."""
    inner = out.shape[1]
    bits = np.empty(inner, np.int32)
    powers = bits.view(np.float32)
    for n in range(out.shape[0]):
        gates, ups, line = gate_up[n, :inner], gate_up[n, inner:], out[n]
        for i in range(inner):
            t = min(max(-gates[i] * _LOG2_E, np.float32(-126.0)), np.float32(126.0))
            whole = np.floor(t)
            bits[i] = (np.int32(whole) + _EXPONENT_BIAS) << _EXPONENT_BIT
            line[i] = _power_of_two(t - whole)
        for i in range(inner):
            line[i] = gates[i] / (np.float32(1.0) + line[i] * powers[i]) * ups[i]


@compiled(fastmath=True)
def _softmax(line: F32, count: int, bits: I32, powers: F32) -> None:
    """The softmax in place of the first `count` scores, and 0 after them. bits, powers: the same memory, as integers too."""
    high = np.float32(-3.0e38)
    for k in range(count):
        high = max(high, line[k])
    for k in range(count):
        t = max((line[k] - high) * _LOG2_E, np.float32(-126.0))
        whole = np.floor(t)
        bits[k] = (np.int32(whole) + _EXPONENT_BIAS) << _EXPONENT_BIT
        line[k] = _power_of_two(t - whole)
    mass = np.float32(0.0)
    for k in range(count):
        line[k] *= powers[k]
        mass += line[k]
    inverse = np.float32(1.0) / mass
    for k in range(count):
        line[k] *= inverse
    line[count:] = np.float32(0.0)


class Context(NamedTuple):
    """What T query tokens attend to. Token t is row rows[t] of the queries, and attends to the first context[t] tokens of the
    sequence whose blocks are tables[table_of[t]], (sequences, most blocks).

    A run is the tokens runs[j] to runs[j + 1] - 1: neighbours in a sequence, which read its keys and values together.
    """

    tables: I64
    rows: I64
    runs: I64
    table_of: I64
    context: I64


@compiled(fastmath=True)
def attend(
    q: F32, heads: int, pool: tuple[Kv, Kv], where: Context, scale: float, out: F32, first: int, last: int
) -> None:
    """Attention of query tokens over the paged cache, for the work items `first` to `last` - 1.

        out[row, h] = sum over k of softmax_k(scale q[row, h] . key[k]) value[k]

    Item i is KV head i % Hkv of the run i // Hkv. q: (N, at least H * D), out: (N, H * D). pool: keys, values. The same in
    PyTorch: `attention.PagedBatch._attend_with_gathered`.
    """
    k_pool, v_pool = pool
    tables, rows, runs, table_of, context = where
    kv_heads, dim, size = k_pool.shape[1], k_pool.shape[2], k_pool.shape[3]
    group = heads // kv_heads
    most, longest = 0, 0
    for i in range(first, last):
        begin, end = runs[i // kv_heads], runs[i // kv_heads + 1]
        most, longest = max(most, end - begin), max(longest, context[end - 1])
    room = -(-longest // size) * size
    scores = np.empty((most * group, room), np.float32)
    bits = np.empty(room, np.int32)
    powers = bits.view(np.float32)
    key_numbers, value_numbers = np.empty((dim, size), np.float32), np.empty((size, dim), np.float32)
    key_bits, value_bits = key_numbers.view(np.uint32), value_numbers.view(np.uint32)
    query = np.empty((most * group, dim), np.float32)
    total = np.empty((most * group, dim), np.float32)
    for i in range(first, last):
        begin, end, g = runs[i // kv_heads], runs[i // kv_heads + 1], i % kv_heads
        lines, longest, table = (end - begin) * group, context[end - 1], table_of[begin]
        blocks = -(-longest // size)
        for j in range(lines):
            row, at = rows[begin + j // group], (g * group + j % group) * dim
            for d in range(dim):
                query[j, d] = q[row, at + d] * np.float32(scale)
            scores[j, : blocks * size] = np.float32(0.0)
            total[j] = np.float32(0.0)
        for b in range(blocks):
            keys = _as_float32(k_pool[tables[table, b], g], key_numbers, key_bits)
            place = scores.ctypes.data + 4 * b * size
            add_product(query.ctypes.data, keys.ctypes.data, place, Product(lines, dim, size, dim, size, room))
        for j in range(lines):
            _softmax(scores[j, :longest], context[begin + j // group], bits, powers)
        for b in range(blocks):
            values = _as_float32(v_pool[tables[table, b], g], value_numbers, value_bits)
            place, count = scores.ctypes.data + 4 * b * size, min(size, longest - b * size)
            add_product(place, values.ctypes.data, total.ctypes.data, Product(lines, count, dim, room, dim, dim))
        for j in range(lines):
            row, at = rows[begin + j // group], (g * group + j % group) * dim
            for d in range(dim):
                out[row, at + d] = total[j, d]
