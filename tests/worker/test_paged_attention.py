"""The compiled attention kernel computes attention over the cache, for any dtype, number of threads and mix of segments."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock.worker_service.engine.torch import attention
from penstock.worker_service.engine.torch.attention import KernelThreads, KvPool, PagedBatch
from penstock.worker_service.engine.torch.step_layout import Segment

HEADS, KV_HEADS, DIM = 6, 2, 10  # groups of three; no multiple of the kernel's unrolling


def random_step(
    seed: int, dtype: torch.dtype, block_tokens: int
) -> tuple[KvPool, list[Segment], np.ndarray, torch.Tensor, list[torch.Tensor]]:
    """Decodes, short chunks and prompts over a random cache: pool, segments, tables, qkv, and each segment's attention."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [(rng.randint(0, 60), rng.choice((1, 1, 1, 3, 8, 9, 20))) for _ in range(7)]
    lengths[0] = (0, 12)  # a prompt from its beginning
    width = max(-(-(start + count) // block_tokens) for start, count in lengths)
    free = list(range(len(lengths) * width))
    rng.shuffle(free)
    tables = np.array(free, np.int64).reshape(len(lengths), width)
    pool = KvPool(1, len(free), block_tokens, KV_HEADS, DIM, dtype, "cpu")
    segments, parts, expected = [], [], []
    first = 0
    for i, (start, count) in enumerate(lengths):
        end = start + count
        q = torch.randn(count, HEADS, DIM, generator=generator).to(dtype)
        k, v = (torch.randn(end, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2))
        for position in range(start):
            block, place = int(tables[i, position // block_tokens]), position % block_tokens
            pool.k[0][block, :, :, place] = k[position]
            pool.v[0][block, :, place] = v[position]
        segments.append(Segment(first, count, start, i))
        parts.append(torch.cat((q, k[start:], v[start:]), 1).flatten(1))
        mask = torch.arange(end)[None, :] <= torch.arange(start, end)[:, None]
        query, key, value = (x.float().transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        exact = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.4, enable_gqa=True)
        expected.append(exact.squeeze(0).transpose(0, 1).flatten(1))
        first += count
    return pool, segments, tables, torch.cat(parts), expected


def attended(
    seed: int, dtype: torch.dtype, block_tokens: int, threads: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of a random step, and what it must be."""
    pool, segments, tables, qkv, expected = random_step(seed, dtype, block_tokens)
    paged = PagedBatch(pool, segments, tables, KernelThreads(threads) if threads is not None else None)
    paged.place([torch.from_numpy(np.ascontiguousarray(index)) for index in paged.indices])
    return paged.attend(0, qkv, HEADS, 0.4), torch.cat(expected)


@pytest.mark.parametrize("block_tokens", [5, 16])
@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_attention_is_that_of_each_sequence_alone(
    dtype: torch.dtype, tolerance: float, threads: int | None, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MIN_THREAD_WORK", 1)
    for seed in range(6):
        result, expected = attended(seed, dtype, block_tokens, threads)
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_THREAD_WORK", 1)
    for seed in range(6):
        one, _ = attended(seed, torch.float32, 16, 1)
        for threads in (2, 3, 7):
            assert torch.equal(attended(seed, torch.float32, 16, threads)[0], one)


def test_threads_get_parts_of_about_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each work item is in one part; no part has more than its share and one item. Little work is not divided."""
    pool = KvPool(1, 64, 16, KV_HEADS, DIM, torch.float32, "cpu")
    segments = [Segment(i, 1, start, i) for i, start in enumerate((3, 900, 40, 7, 300))]
    paged = PagedBatch(pool, segments, np.zeros((5, 60), np.int64), KernelThreads(3))
    assert paged._cuts == [0, 10]
    monkeypatch.setattr(attention, "MIN_THREAD_WORK", 1)
    cuts = PagedBatch(pool, segments, np.zeros((5, 60), np.int64), KernelThreads(3))._cuts
    assert cuts[0] == 0
    assert cuts[-1] == 10
    assert cuts == sorted(cuts)
    work = np.repeat([s.start + 1 for s in segments], KV_HEADS)
    shares = [work[a:b].sum() for a, b in pairwise(cuts)]
    assert max(shares) <= work.sum() / 3 + work.max()
