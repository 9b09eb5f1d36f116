"""How much KV the torch engine holds, and how a step's indices travel to a device."""

import numpy as np
import pytest
import torch

from worker_service.engine.interface import KvLayout
from worker_service.engine.torch.engine import KV_SHARE_OF_FREE_MEMORY, kv_blocks
from worker_service.engine.torch.uploads import packed, unpacked, uploaded

LAYOUT = KvLayout("digest", layers=28, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")


def test_the_mesh_file_decides_how_much_kv_there_is_where_it_says_so() -> None:
    for free_bytes in (None, 1 << 20, 1 << 40):
        assert kv_blocks(1000, LAYOUT, free_bytes) == 62


def test_kv_fills_the_free_memory_of_a_gpu_but_for_a_margin() -> None:
    """Never more than there is; one block at least, whose allocation then fails with the reason."""
    for free_bytes in (1 << 30, 80 << 30, 123_456_789_012):
        used = kv_blocks(None, LAYOUT, free_bytes) * LAYOUT.block_bytes
        assert free_bytes * KV_SHARE_OF_FREE_MEMORY - LAYOUT.block_bytes < used <= free_bytes * KV_SHARE_OF_FREE_MEMORY
    assert kv_blocks(None, LAYOUT, 10) == 1
    assert kv_blocks(None, LAYOUT, None) * LAYOUT.block_tokens == 32_768


@pytest.mark.parametrize("seed", range(3))
def test_packed_indices_arrive_as_they_were(seed: int) -> None:
    """One buffer for all, empty and transposed arrays included."""
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 2**40, size=shape) for shape in ((5,), (0,), (3, 4), (1,), (2, 0))]
    arrays.append(rng.integers(0, 9, size=(4, 6)).T)
    buffer = packed(arrays, pinned=False)
    assert buffer.shape == (sum(array.size for array in arrays),)
    for result, array in zip(unpacked(buffer, arrays), arrays, strict=True):
        np.testing.assert_array_equal(result.numpy(), array)
    for result, array in zip(uploaded(arrays, torch.device("cpu")), arrays, strict=True):
        np.testing.assert_array_equal(result.numpy(), array)
