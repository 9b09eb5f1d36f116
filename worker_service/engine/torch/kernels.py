"""Paged attention for one query token at a time on a CPU, compiled by numba.

The layouts are chosen for vector registers: with keys as (block, kv_head, dim, slot), the scores of a block are `dim`
multiply-adds over all slots at once; with values as (block, kv_head, slot, dim), the output is one multiply-add over `dim`
per slot. Measured against gathering blocks and calling torch's SDPA: see docs/engine.md.
"""

import numba
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

_LOG2_E = np.float32(1.4426950408889634)


@numba.njit(nogil=True, fastmath=True, cache=True)
def store(k: F32, v: F32, k_pool: F32, v_pool: F32, slots: I64) -> None:
    """Write keys and values (N, Hkv, D) of N tokens into the pools; `slots`: block * block_tokens + position in the block."""
    size = v_pool.shape[2]
    for n in range(k.shape[0]):
        block, at = slots[n] // size, slots[n] % size
        for h in range(k.shape[1]):
            for d in range(k.shape[2]):
                k_pool[block, h, d, at] = k[n, h, d]
                v_pool[block, h, at, d] = v[n, h, d]


@numba.njit(nogil=True, fastmath=True, cache=True)
def attend(q: F32, k_pool: F32, v_pool: F32, tables: I64, table_of: I64, context: I64, scale: float, out: F32) -> None:
    """Attention of R single query tokens over the paged cache.

    q, out: (R, H, D). tables: (T, most blocks). Row r attends to the first `context[r]` tokens of table `table_of[r]`.
    """
    rows, heads, dim = q.shape
    kv_heads, size = k_pool.shape[1], k_pool.shape[3]
    group = heads // kv_heads
    longest = 0
    for r in range(rows):
        longest = max(longest, context[r])
    room = -(-longest // size) * size
    scores = np.empty(room, np.float32)
    bits = np.empty(room, np.int32)
    powers = bits.view(np.float32)
    line = np.empty(size, np.float32)
    total = np.empty(dim, np.float32)
    for r in range(rows):
        n = context[r]
        blocks = -(-n // size)
        for h in range(heads):
            g = h // group
            for b in range(blocks):
                block = tables[table_of[r], b]
                line[:] = np.float32(0.0)
                for d in range(dim):
                    x = q[r, h, d] * np.float32(scale)
                    for s in range(size):
                        line[s] += x * k_pool[block, g, d, s]
                for s in range(size):
                    scores[b * size + s] = line[s]
            high = np.float32(-3.0e38)
            for i in range(n):
                high = max(high, scores[i])
            # exp(x) = 2^whole * 2^part: the whole part goes into the exponent bits, the part through a polynomial
            for i in range(n):
                t = max((scores[i] - high) * _LOG2_E, np.float32(-126.0))
                integral = np.floor(t)
                part = t - integral
                bits[i] = (np.int32(integral) + np.int32(127)) << np.int32(23)
                y = np.float32(1.5403530e-4)
                y = y * part + np.float32(1.3333558e-3)
                y = y * part + np.float32(9.6181291e-3)
                y = y * part + np.float32(5.5504109e-2)
                y = y * part + np.float32(2.4022651e-1)
                y = y * part + np.float32(6.9314718e-1)
                scores[i] = y * part + np.float32(1.0)
            mass = np.float32(0.0)
            for i in range(n):
                scores[i] *= powers[i]
                mass += scores[i]
            total[:] = np.float32(0.0)
            for b in range(blocks):
                block = tables[table_of[r], b]
                for s in range(min(size, n - b * size)):
                    x = scores[b * size + s]
                    for d in range(dim):
                        total[d] += x * v_pool[block, g, s, d]
            inverse = np.float32(1.0) / mass
            for d in range(dim):
                out[r, h, d] = total[d] * inverse
