"""Chats become training batches; Muon's steps."""

import random

import pytest
import torch

from models.training.hardware import autocast, device_named
from models.training.muon import Muon, orthogonal
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


SHAPES = ((48, 48), (48, 16), (16, 48), (48, 48))


@pytest.mark.parametrize("shape", [(48, 48), (96, 16), (16, 96)])
def test_singular_values_become_nearly_equal(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, *shape)))
    assert 0.3 < values.min() <= values.max() < 1.3


def test_it_takes_the_steps_that_torchs_own_takes() -> None:
    """Up to the rounding of bfloat16, over several steps, with momentum and weight decay."""
    torch.manual_seed(2)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimisers = Muon(ours, 0.02, weight_decay=0.1), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1)
    before = [parameter.detach().clone() for parameter in ours]
    for _ in range(4):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    for own, other, start in zip(ours, theirs, before, strict=True):
        moved = (other - start).norm()
        assert (own - other).norm() < 0.02 * moved


def test_a_parameter_without_a_gradient_stays() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    parameters[0].grad = torch.eye(4)
    Muon(parameters, 0.1).step()
    assert not torch.equal(parameters[0], torch.ones(4, 4))
    assert torch.equal(parameters[1], torch.ones(4, 4))
