"""Chats become training batches."""

import random

import pytest

from models.training.data import IGNORED, PAD, Row, pack


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
