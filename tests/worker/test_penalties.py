"""Penalties and biases: their definitions, and that they are a function of the reply's tokens alone."""

import math

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.penalties import logit_changes
from penstock.worker_service.engine.sampling import Position, adjusted, choose

VOCABULARY = 300
OUTPUT = [5, 7, 5, 299, 5, 7]


def random_logits(rows: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


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
    changes = logit_changes(SamplingParams(logit_bias={1: 1.0, 999: 1.0}), [], VOCABULARY)
    assert changes is not None
    assert changes.token_ids.tolist() == [1]
    assert logit_changes(SamplingParams(logit_bias={999: 1.0}), [], VOCABULARY) is None
    assert logit_changes(SamplingParams(presence_penalty=1.0), [], VOCABULARY) is None


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 1.0), (0, 0.9), (40, 0.7)])
def test_min_p_cuts_off_what_top_k_and_top_p_leave(top_k: int, top_p: float) -> None:
    """A token is kept if it is in their set and has at least min_p of the greatest probability; draws are of these."""
    logits = random_logits(40)
    for min_p in (0.02, 0.3, 1.0):
        with_it = [Position(SamplingParams(1.3, top_p, i, top_k=top_k, min_p=min_p), i) for i in range(40)]
        tokens = choose(logits, with_it)
        for line, token in zip(torch.softmax(logits / 1.3, -1), tokens, strict=True):
            assert line[token] >= min_p * line.max() * (1 - 1e-6)
        if min_p == 1.0:
            assert tokens == logits.argmax(-1).tolist()


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
