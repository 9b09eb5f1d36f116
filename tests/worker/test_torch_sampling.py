"""Draws from a large vocabulary: the same as from the sorted whole of it, mostly without sorting it."""

import numpy as np
import pytest
import torch

from penstock.services.domain.randomness import uniform
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine import sampling
from penstock.worker_service.engine.sampling import Position, choose

VOCABULARY = 9000


def logits_of(kind: str, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, VOCABULARY, generator=generator)
    match kind:
        case "peaked":
            return noise * 4
        case "flat":
            return noise * 0.01
        case "tied":
            return (noise * 4).round()  # many equal ones at every rank, the last of the sorted ones included
        case _:
            return (noise * 4).bfloat16().float()


def reference(logits: torch.Tensor, position: Position) -> int:
    """The token by the definition: sort all, cut at top_k, then at top_p, draw by inversion."""
    params = position.sampling
    probabilities = torch.softmax((logits - logits.max()) / (params.temperature or 1.0), -1)
    ranked, ids = probabilities.sort(stable=True, descending=True)
    precise = ranked.double().numpy()
    kept = np.ones(len(precise), bool)
    if params.top_k:
        kept[params.top_k :] = False
    if (top_p := params.top_p or 1.0) < 1:
        share = top_p * (precise[kept].sum() if params.top_k else 1.0)
        kept &= np.cumsum(precise) - precise < share
    kept &= precise >= params.min_p * precise[0] * (1 - 1e-6)
    kept[0] = True
    weights = np.where(kept, precise, 0.0)
    goal = uniform(params.seed or 0, position.offset) * weights.sum()
    place = min(int(np.searchsorted(np.cumsum(weights), goal, side="right")), int(kept.sum()) - 1)
    return int(ids[place])


@pytest.mark.parametrize("kind", ["peaked", "flat", "tied", "bfloat16"])
def test_draws_are_those_of_the_sorted_vocabulary(kind: str) -> None:
    limits = (
        (0, 1.0, 0.0),
        (0, 0.9, 0.0),
        (20, 1.0, 0.0),
        (20, 0.8, 0.1),
        (400, 0.95, 0.0),
        (8999, 0.5, 0.02),
        (1, 1.0, 0.0),
    )
    for seed, (top_k, top_p, min_p) in enumerate(limits):
        for temperature in (0.6, 1.0, 1.7):
            logits = logits_of(kind, 8, seed)
            rows = [
                Position(SamplingParams(temperature, top_p, 100 * seed + i, top_k=top_k, min_p=min_p), offset=i)
                for i in range(8)
            ]
            assert choose(logits, rows) == [reference(line, row) for line, row in zip(logits, rows, strict=True)]


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.cat([logits_of(kind, 3, 9) for kind in ("peaked", "flat", "tied")])
    limits = [(1.0, 0), (0.9, 0), (1.0, 7)] * 3
    rows = [Position(SamplingParams(1.0, top_p, i, top_k=top_k), 5) for i, (top_p, top_k) in enumerate(limits)]
    together = choose(logits, rows)
    assert together == [choose(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def test_the_vocabulary_is_sorted_only_where_the_draw_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = sampling._ranked
    tops = list[tuple[int, int]]()

    def counted(probabilities: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tops.append((len(probabilities), top))
        return ranked(probabilities, top)

    monkeypatch.setattr(sampling, "_ranked", counted)
    peaked = [Position(SamplingParams(0.7, 0.95, i, top_k=20), i) for i in range(8)]
    choose(logits_of("peaked", 8, 1), peaked)
    assert tops == [(8, 256)]
    tops.clear()
    mixed = torch.cat([logits_of("peaked", 4, 1), logits_of("flat", 1, 1)])
    choose(mixed, [*peaked[:4], Position(SamplingParams(1.0, 0.9, 3), 0)])
    assert tops == [(5, 256), (1, 8192)], "one row is flat: it alone needs more"
    tops.clear()
    choose(mixed, [*peaked[:4], Position(SamplingParams(1.0, 0.99, 3), 0)])
    assert tops == [(5, 256), (1, 8192), (1, VOCABULARY)]
