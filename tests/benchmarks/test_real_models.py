"""What is computed from records of real models' answers."""

import random
from dataclasses import asdict, replace

import numpy as np

from benchmarks.real_models import compare, scorer_quality
from benchmarks.real_models.costs import TokenCost
from benchmarks.real_models.prompts import MODELS
from benchmarks.real_models.records import Record, read
from benchmarks.real_models.systems import Model, Policy, System, compared, cross_fitted, outcome, read_answers
from tests.support.present import present

PROMPTS = [f"p{i}" for i in range(200)]
TEXTS = {name: f"prompt {name}" for name in PROMPTS}


def answers_of(share: float, cpu_s: float, seed: int, *, tells: bool) -> Model:
    """Answers of which a share is right. tells: all examples pass exactly where they are; else nothing tells."""
    rng = random.Random(seed)
    made = {}
    for name in PROMPTS:
        right, noise = rng.random() < share, -rng.random()
        examples = (2, 2 * right) if tells else (0, 0)
        made[name] = Record(name, "humaneval", right, (100, 100), False, noise, 2 * noise, examples, "")
    return Model(made, TokenCost(0.0, cpu_s / 100), {})


def test_a_judge_that_knows_saves_what_the_small_model_can_answer() -> None:
    """And of no other answers: right where one of the two is, at the price of both only where the small one is wrong."""
    small, large = answers_of(0.7, 1.0, 1, tells=True), answers_of(0.8, 4.0, 2, tells=True)
    result = cross_fitted([small, large], TEXTS, PROMPTS, System((0, 1), "examples"), "cheap")
    either = [bool(small.records[p].right or large.records[p].right) for p in PROMPTS]
    assert result.right.tolist() == either
    assert result.cpu_s.tolist() == [1.0 if small.records[p].right else 5.0 for p in PROMPTS]


def test_a_rejected_answer_is_the_draft_of_the_next_one() -> None:
    """What that saves counts where the large model answers after the small one, and nowhere else."""
    small = replace(answers_of(0.7, 1.0, 1, tells=True), name="small")
    large = replace(answers_of(0.8, 4.0, 2, tells=True), drafted={("small", "humaneval"): 0.5})
    result = cross_fitted([small, large], TEXTS, PROMPTS, System((0, 1), "examples"), "cheap")
    assert result.cpu_s.tolist() == [1.0 if small.records[p].right else 3.0 for p in PROMPTS]
    answers = read_answers([small, large], "examples", PROMPTS, np.arange(len(PROMPTS)))
    assert outcome(answers, Policy((1,))).cpu_s.tolist() == [4.0] * len(PROMPTS)


def test_where_prompts_tell_that_a_model_fails_it_is_passed_over() -> None:
    """Then the larger model has no draft, and what it costs alone is the whole price."""
    small = replace(answers_of(0.7, 1.0, 1, tells=True), name="small")
    large = replace(answers_of(0.8, 4.0, 2, tells=True), drafted={("small", "humaneval"): 0.95})
    sums = set(PROMPTS[::2])
    small = small.only(
        {p: replace(each, right=False, examples=(2, 0)) if p in sums else each for p, each in small.records.items()}
    )
    texts = {p: f"What is the sum of {p}?" if p in sums else f"Write a program {p}" for p in PROMPTS}
    skipping = cross_fitted([small, large], texts, PROMPTS, System((0, 1), "examples", "skipping"), "cheap")
    cascade = cross_fitted([small, large], texts, PROMPTS, System((0, 1), "examples"), "cheap")
    assert set(skipping.cpu_s[::2]) == {4.0}
    assert np.allclose(cascade.cpu_s[::2], 4.8)
    assert skipping.cpu_s[1::2].mean() < 3.0
    assert skipping.right[::2].tolist() == cascade.right[::2].tolist()


def test_without_a_judge_that_tells_nothing_is_won() -> None:
    """Held out, no system is both cheaper and better than drawing one of the two models, by more than chance."""
    by_model = [answers_of(0.5, 1.0, 1, tells=False), answers_of(0.8, 2.0, 2, tells=False)]
    for kind in ("cascade", "best", "skipping", "routing"):
        found = present(compare(by_model, TEXTS, System((0, 1), "mean", kind), "right"))
        assert found["right"] <= found["mixed_right"] + 0.08
    quality = present(scorer_quality(by_model[0].records, "mean"))
    assert quality["auc"][1] < 0.55


def test_cut_answers_are_never_accepted() -> None:
    small = answers_of(1, 1, 1, tells=True)
    cut = {name: replace(each, truncated=True) for name, each in small.records.items()}
    answers = read_answers(
        [small.only(cut), answers_of(0.5, 2, 2, tells=True)], "examples", PROMPTS, np.arange(len(PROMPTS))
    )
    assert outcome(answers, Policy((0, 1), (-1e9,))).cpu_s.tolist() == [3.0] * len(PROMPTS)


def test_intervals_are_paired() -> None:
    """A system that differs from another one by the same amount everywhere has no interval of cost."""
    answers = read_answers([answers_of(0.6, 1.0, 1, tells=True)] * 2, "examples", PROMPTS, np.arange(len(PROMPTS)))
    one = outcome(answers, Policy((0,)))
    assert compared(one, one) == {"points": [0, 0, 0], "cpu": [1, 1, 1]}


def test_records_have_no_texts() -> None:
    """What is committed cannot be turned back into the answers or the prompts."""
    for model in MODELS:
        for record in read(model).values():
            assert max(len(value) for value in asdict(record).values() if isinstance(value, str)) <= 24
