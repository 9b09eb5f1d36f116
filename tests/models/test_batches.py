"""Chats become training batches."""

import random

import pytest
import torch

from models.training.hardware import autocast, device_named
from models.training.rows import IGNORED, PAD, Row, pack


@pytest.mark.parametrize("limit", [1, 16, 100, 10_000])
def test_packing_keeps_every_row_in_order_within_the_limit(limit: int) -> None:
    """Every row comes out once, in order and unchanged; no batch of several rows exceeds the limit with its padding."""
    rng = random.Random(limit)
    rows: list[Row] = []
    for _ in range(40):
        ids = [rng.randrange(PAD + 1, 400) for _ in range(rng.randint(1, 30))]
        rows.append((ids, [IGNORED, *ids[1:]]))
    batches = pack(rows, limit)
    unpacked = [
        (ids[ids != PAD].tolist(), labels[ids != PAD].tolist())
        for batch in batches
        for ids, labels in zip(batch.input_ids, batch.labels, strict=True)
    ]
    assert unpacked == rows
    assert all(batch.input_ids.numel() <= limit or len(batch.input_ids) == 1 for batch in batches)
    assert all((batch.labels[batch.input_ids == PAD] == IGNORED).all() for batch in batches)


def test_packing_nothing_makes_no_batch() -> None:
    assert pack([], 100) == []


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_named("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="device cuda: torch sees no GPU"):
        device_named("cuda")


@pytest.mark.parametrize("capability", [None, "avx512_bf16", "amx_bf16"])
def test_a_cpu_that_would_emulate_bfloat16_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, capability: str | None
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True} if capability else {})
    with autocast(torch.device("cpu")):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if capability else torch.float32)
