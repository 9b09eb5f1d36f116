"""Which token is drawn: random numbers, penalties and biases, draws from a large vocabulary mostly without sorting it."""

import math

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from penstock.services.domain.randomness import uniform
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine import sampling
from penstock.worker_service.engine.penalties import logit_changes
from penstock.worker_service.engine.sampling import Position, adjusted, choose

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
        (0, 1.0, 0.3),
        (0, 0.9, 1.0),
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


def test_uniform_numbers_are_uniform_and_differ_by_seed_offset_and_purpose() -> None:
    values = np.array([uniform(seed, offset) for seed in range(100) for offset in range(100)])
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(values.var() - 1 / 12) < 0.005
    assert len(set(values)) == len(values)
    assert uniform(1, 2, 0) != uniform(1, 2, 1)


FEW = 300
OUTPUT = [5, 7, 5, 299, 5, 7]


def random_logits(rows: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, FEW, generator=torch.Generator().manual_seed(seed)) * 3


def test_penalties_are_those_of_openais_formula_and_of_ctrl() -> None:
    """Repetition as transformers computes it, then the counts of OpenAI's formula, then the biases."""
    sampling = SamplingParams(
        frequency_penalty=0.3, presence_penalty=-0.8, repetition_penalty=1.4, logit_bias={7: 2.0, 11: -100.0}
    )
    logits = random_logits(1)
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([OUTPUT]), logits.clone())
    for token in set(OUTPUT):
        expected[0, token] -= 0.3 * OUTPUT.count(token) - 0.8
    expected[0, 7] += 2.0
    expected[0, 11] -= 100.0
    torch.testing.assert_close(adjusted(logits, [Position(sampling, 6, OUTPUT)]), expected)


def test_rows_have_their_own_changes_and_the_logits_are_kept() -> None:
    logits = random_logits(3)
    before = logits.clone()
    plain, biased = SamplingParams(), SamplingParams(logit_bias={0: 1.5})
    rows = [Position(plain, 6), Position(biased, 6), Position(SamplingParams(presence_penalty=1.0), 6, OUTPUT)]
    result = adjusted(logits, rows)
    assert torch.equal(logits, before)
    assert torch.equal(result[0], before[0])
    changed = [np.flatnonzero(result[i] != before[i]).tolist() for i in (1, 2)]
    assert changed == [[0], sorted(set(OUTPUT))]
    assert adjusted(logits, rows[:1]) is logits, "nothing is copied where nothing changes"


def test_tokens_beyond_the_vocabulary_have_no_logit() -> None:
    changes = logit_changes(SamplingParams(logit_bias={1: 1.0, 999: 1.0}), [], FEW)
    assert changes is not None
    assert changes.token_ids.tolist() == [1]
    assert logit_changes(SamplingParams(logit_bias={999: 1.0}), [], FEW) is None
    assert logit_changes(SamplingParams(presence_penalty=1.0), [], FEW) is None


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(frequency_penalty=2.1), "frequency_penalty"),
        (SamplingParams(presence_penalty=math.nan), "presence_penalty"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=2.5), "repetition_penalty"),
        (SamplingParams(min_p=-0.1), "min_p"),
        (SamplingParams(logit_bias={1: 101.0}), "logit_bias"),
        (SamplingParams(logit_bias={1: math.nan}), "logit_bias"),
        (SamplingParams(logit_bias={2**31: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids"),
        (SamplingParams(stop_token_ids=tuple(range(65))), "stop_token_ids"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(sampling: SamplingParams, field: str) -> None:
    assert [p.field for p in sampling.problems("sampling")] == [f"sampling.{field}"]
