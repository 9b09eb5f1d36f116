"""How much KV the built-in engine holds, and how much it computes in a step."""

import pytest

from penstock.services.clock import SystemClock
from penstock.types.workers import KvLayout
from penstock.worker_service.engine import assembly
from penstock.worker_service.engine.assembly import (
    KV_SHARE_OF_GPU,
    KV_SHARE_OF_HOST,
    LEAST_KV_BYTES,
    Memory,
    host_memory,
    kv_blocks,
)
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core
from tests.conftest import FAMILY

BLOCK_BYTES = KvLayout("", layers=28, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16").block_bytes


def test_the_mesh_file_decides_how_much_kv_there_is_where_it_says_so() -> None:
    for free_bytes in (1 << 20, 1 << 40):
        for shared in (False, True):
            assert kv_blocks(1000, 16, BLOCK_BYTES, 1, 1, Memory(free_bytes, shared)) == 62


def test_kv_fills_the_free_memory_of_a_gpu_but_for_a_margin() -> None:
    """Never more than there is; one block at least, whose allocation then fails with the reason."""
    for free_bytes in (1 << 30, 80 << 30, 123_456_789_012):
        used = kv_blocks(None, 16, BLOCK_BYTES, 1, 1 << 40, Memory(free_bytes, shared=False)) * BLOCK_BYTES
        assert free_bytes * KV_SHARE_OF_GPU - BLOCK_BYTES < used <= free_bytes * KV_SHARE_OF_GPU
    assert kv_blocks(None, 16, BLOCK_BYTES, 1, 1 << 40, Memory(10, shared=False)) == 1


def test_kv_on_a_host_is_no_more_than_the_weights_nor_than_all_requests_can_fill() -> None:
    def kv_bytes(weights: int, free: int, most_tokens: int = 1 << 40) -> int:
        return kv_blocks(None, 16, BLOCK_BYTES, weights, most_tokens, Memory(free, shared=True)) * BLOCK_BYTES

    assert kv_bytes(1, 64 << 30) == pytest.approx(LEAST_KV_BYTES, abs=BLOCK_BYTES)
    assert kv_bytes(8 << 30, 64 << 30) == pytest.approx(8 << 30, abs=BLOCK_BYTES)
    assert kv_bytes(8 << 30, 16 << 30) == pytest.approx((16 << 30) * KV_SHARE_OF_HOST, abs=BLOCK_BYTES)
    assert kv_bytes(8 << 30, 64 << 30, 1000) == 63 * BLOCK_BYTES
    assert host_memory().free_bytes > 0


def test_a_step_has_no_more_tokens_than_fit_into_its_time_unless_the_tier_states_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small model keeps the default; a slow one computes few, a very slow one at least a token for each request."""

    def step_tokens(stated: int | None) -> int:
        options = TorchEngineOptions(FAMILY / "small", "small", kv_tokens=1024, max_running=4, max_step_tokens=stated)
        core, _ = torch_core(options, SystemClock())
        assert core.idle
        assert core.scheduler.limits == core.limits.batch
        return core.limits.batch.max_step_tokens

    monkeypatch.setattr(assembly, "STEP_S", 3600.0)
    assert step_tokens(None) == 512
    monkeypatch.setattr(assembly, "STEP_S", 1e-9)
    monkeypatch.setattr(assembly, "LONGEST_STEP_S", 3600.0)
    assert step_tokens(None) == assembly.EFFICIENT_TOKENS
    monkeypatch.setattr(assembly, "LONGEST_STEP_S", 1e-9)
    assert step_tokens(None) == 4
    assert step_tokens(300) == 300
