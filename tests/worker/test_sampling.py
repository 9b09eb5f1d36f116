"""Which token is drawn: random numbers, penalties and biases, draws from a large vocabulary mostly without sorting it."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from penstock.services.domain.randomness import uniform
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.logits import F32, HostLogits, Ranked
from penstock.worker_service.engine.penalties import logit_changes
from penstock.worker_service.engine.sampling import Position, adjusted, choose, logprobs
from penstock.worker_service.engine.torch.device_logits import DeviceLogits

VOCABULARY = 9000
KINDS = ("peaked", "flat", "tied", "bfloat16")


def on_device(values: F32) -> DeviceLogits:
    return DeviceLogits(torch.from_numpy(values))


PLACES = pytest.mark.parametrize("logits_at", [HostLogits, on_device])


def logits_of(kind: str, rows: int, seed: int) -> F32:
    noise = np.random.default_rng(seed).standard_normal((rows, VOCABULARY), np.float32)
    match kind:
        case "peaked":
            return noise * 4
        case "flat":
            return noise * np.float32(0.01)
        case "tied":
            return (noise * 4).round()  # many equal ones at every rank, the last of the sorted ones included
        case _:
            return torch.from_numpy(noise * 4).bfloat16().float().numpy()


def reference(logits: HostLogits | DeviceLogits, row: int, position: Position) -> int:
    """The token by the definition: sort all, cut at top_k, then at top_p, draw by inversion."""
    params = position.sampling
    ids, ranked, *_ = (each[0] for each in logits.rows([row]).ranked([params.temperature or 1.0], VOCABULARY))
    precise = ranked.astype(np.float64)
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


@PLACES
@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_those_of_softmax(kind: str, logits_at: Callable[[F32], HostLogits | DeviceLogits]) -> None:
    logits, temperature = logits_of(kind, 4, 5), 0.8
    expected = torch.softmax(torch.from_numpy(logits).double() / temperature, -1).numpy()
    ranked = logits_at(logits).ranked([temperature] * 4, VOCABULARY)
    np.testing.assert_allclose(ranked.probabilities, np.take_along_axis(expected, ranked.ids, -1), 1e-4)
    for ids, probabilities in zip(ranked.ids, ranked.probabilities, strict=True):
        assert all(np.lexsort((ids, -probabilities)) == np.arange(VOCABULARY)), "descending, equal ones by their id"


@PLACES
def test_logprobs_are_those_of_log_softmax(logits_at: Callable[[F32], HostLogits | DeviceLogits]) -> None:
    logits = logits_of("peaked", 3, 6)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    shown, ids = expected.topk(5, -1)
    rows = logprobs(logits_at(logits), [7, 8, 9], [0, 2, 5])
    assert [row.chosen for row in rows] == pytest.approx([float(expected[i, 7 + i]) for i in range(3)], abs=1e-4)
    for i, (row, count) in enumerate(zip(rows, (0, 2, 5), strict=True)):
        assert row.top_ids == ids[i, :count].tolist()
        assert row.top == pytest.approx(shown[i, :count].tolist(), abs=1e-4)


@PLACES
def test_a_row_may_have_only_some_tokens(logits_at: Callable[[F32], HostLogits | DeviceLogits]) -> None:
    """Of 70 tokens, the second row may have those of the bits set in words that end at 64."""
    logits = np.random.default_rng(1).standard_normal((2, 70), np.float32)
    restricted = np.asarray(logits_at(logits).restricted([1], np.array([[0b101, -1]], np.int32)).values)
    assert np.array_equal(restricted[0], logits[0])
    assert np.flatnonzero(np.isfinite(restricted[1])).tolist() == [0, 2, *range(32, 64)]


@PLACES
@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_those_of_the_sorted_vocabulary(
    kind: str, logits_at: Callable[[F32], HostLogits | DeviceLogits]
) -> None:
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
            logits = logits_at(logits_of(kind, 8, seed))
            rows = [
                Position(SamplingParams(temperature, top_p, 100 * seed + i, top_k=top_k, min_p=min_p), offset=i)
                for i in range(8)
            ]
            assert choose(logits, rows) == [reference(logits, i, row) for i, row in enumerate(rows)]


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = HostLogits(np.concatenate([logits_of(kind, 3, 9) for kind in ("peaked", "flat", "tied")]))
    limits = [(1.0, 0), (0.9, 0), (1.0, 7)] * 3
    rows = [Position(SamplingParams(1.0, top_p, i, top_k=top_k), 5) for i, (top_p, top_k) in enumerate(limits)]
    together = choose(logits, rows)
    assert together == [choose(logits.rows([i]), [row])[0] for i, row in enumerate(rows)]


def test_the_vocabulary_is_sorted_only_where_the_draw_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked, tops = HostLogits.ranked, list[tuple[int, int]]()

    def counted(logits: HostLogits, temperatures: Sequence[float], top: int) -> Ranked:
        tops.append((len(temperatures), top))
        return ranked(logits, temperatures, top)

    monkeypatch.setattr(HostLogits, "ranked", counted)
    peaked = [Position(SamplingParams(0.7, 0.95, i, top_k=20), i) for i in range(8)]
    choose(HostLogits(logits_of("peaked", 8, 1)), peaked)
    assert tops == [(8, 256)]
    tops.clear()
    mixed = HostLogits(np.concatenate([logits_of("peaked", 4, 1), logits_of("flat", 1, 1)]))
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


def random_logits(rows: int, seed: int = 3) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, FEW), np.float32) * 3


@PLACES
def test_penalties_are_those_of_openais_formula_and_of_ctrl(
    logits_at: Callable[[F32], HostLogits | DeviceLogits],
) -> None:
    """Repetition as transformers computes it, then the counts of OpenAI's formula, then the biases."""
    sampling = SamplingParams(
        frequency_penalty=0.3, presence_penalty=-0.8, repetition_penalty=1.4, logit_bias={7: 2.0, 11: -100.0}
    )
    logits = random_logits(1)
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([OUTPUT]), torch.from_numpy(logits.copy()))
    for token in set(OUTPUT):
        expected[0, token] -= 0.3 * OUTPUT.count(token) - 0.8
    expected[0, 7] += 2.0
    expected[0, 11] -= 100.0
    found = adjusted(logits_at(logits), [Position(sampling, 6, OUTPUT)])
    np.testing.assert_allclose(np.asarray(found.values), expected.numpy(), 1e-6)


def test_rows_have_their_own_changes_and_the_logits_are_kept() -> None:
    logits = HostLogits(random_logits(3))
    before = logits.values.copy()
    plain, biased = SamplingParams(), SamplingParams(logit_bias={0: 1.5})
    rows = [Position(plain, 6), Position(biased, 6), Position(SamplingParams(presence_penalty=1.0), 6, OUTPUT)]
    result = adjusted(logits, rows).values
    assert np.array_equal(logits.values, before)
    assert np.array_equal(result[0], before[0])
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
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids[0]"),
        (SamplingParams(stop_token_ids=tuple(range(65))), "stop_token_ids"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(sampling: SamplingParams, field: str) -> None:
    assert [p.field for p in sampling.problems("sampling")] == [f"sampling.{field}"]
