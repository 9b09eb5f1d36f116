"""The shipped family: what its cards claim, measured again on a sample; and what is made to train it."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from judge_service.calibration import Calibration
from models.training.first import answers, judge, measure, tasks, tokenizer
from models.training.first.answers import Answered
from models.training.growth import grow
from models.training.judge import broken
from models.training.measure import auc
from models.training.smalltalk import SMALLTALK
from services.domain import TextPrompt
from services.mesh_file import load_mesh_file
from tests.conftest import FAMILY, ROOT, TIERS
from worker_service.text.hf import HfTokenizer

SAMPLE = 60
TOKENIZER = HfTokenizer(FAMILY / "small")
MAX_MB, MIN_CONTEXT, MIN_GAP, MIN_LARGEST, MIN_AUC = 12, 2048, 0.15, 0.90, 0.85


@pytest.fixture(scope="module")
def figures() -> Any:
    return json.loads((FAMILY / "figures.json").read_text())


@pytest.fixture(scope="module")
def heldout() -> list[tasks.Problem]:
    return measure.test_problems()


@pytest.fixture(scope="module")
def answered(heldout: list[tasks.Problem]) -> dict[str, list[Answered]]:
    """The tiers' own answers to the first held-out prompts."""
    return {tier: measure.sorted_answers(FAMILY, tier, heldout[:SAMPLE], 1)[0] for tier in TIERS}


def test_the_claims_are_what_the_family_must_reach(figures: Any) -> None:
    accuracy = [figures["tiers"][tier]["accuracy"] for tier in TIERS]
    assert figures["test_prompts"] == 500
    assert accuracy[2] >= MIN_LARGEST
    assert accuracy[2] - accuracy[1] >= MIN_GAP
    assert accuracy[1] - accuracy[0] >= MIN_GAP
    assert min(figures["judge"]["auc"][tier] for tier in ("small", "medium")) >= MIN_AUC
    for tier in TIERS:
        right = figures["tiers"][tier]["right"]
        assert right.count("1") / len(right) == pytest.approx(figures["tiers"][tier]["accuracy"])


def test_every_claim_stands_in_the_cards(figures: Any) -> None:
    for tier in TIERS:
        card = (FAMILY / tier / "README.md").read_text()
        assert f"{100 * figures['tiers'][tier]['accuracy']:.1f} %" in card
        assert f"seed {figures['tiers'][tier]['training']['recipe']['seed']}" in card
    card = (FAMILY / "judge" / "README.md").read_text()
    for tier in ("small", "medium"):
        assert f"{figures['judge']['auc'][tier]:.3f}" in card


def test_a_sample_measured_again_is_what_was_claimed(answered: dict[str, list[Answered]], figures: Any) -> None:
    for tier in TIERS:
        claimed = figures["tiers"][tier]["right"][:SAMPLE]
        now = "".join("01"[a.correct] for a in answered[tier])
        differ = sum(a != b for a, b in zip(claimed, now, strict=True))
        assert differ <= 1, f"{tier}: {differ} of {SAMPLE} differ"  # one: another CPU may round another way


def test_the_judge_tells_good_from_bad_on_the_sample(answered: dict[str, list[Answered]]) -> None:
    found = [*answered["small"], *answered["medium"]]
    scores = judge.score_all(FAMILY / "judge", found, threads=1)
    assert auc(scores, [a.correct for a in found]) >= MIN_AUC


def test_the_readme_questions_are_answered_rightly() -> None:
    """As a reader types them, by the tier at which the shipped mesh lets the answer stand."""
    expected = {"Sort from small to large: 41, 7, 23": "7, 23, 41", "What is 12 + 30?": "42"}
    texts = [(ROOT / name).read_text() for name in ("README.md", "penstock/cli/local.py")]
    asked = re.findall(r"""penstock ask ["'](.+?)["']|generate\("(.+?)"|"content": "(.+?)\"""", "\n".join(texts))
    questions = sorted({next(filter(None, groups)) for groups in asked})
    assert set(questions) == set(expected), "give each question of the README its answer here"
    calibration = Calibration.read(FAMILY / "judge" / "calibration.json")
    thresholds = {tier.name: tier.threshold for tier in load_mesh_file(ROOT / "mesh.yaml").tiers}
    problems = [tasks.Problem("readme", 1, question, "", expected[question], question) for question in questions]
    standing: dict[str, Answered] = {}
    for tier in TIERS:
        for answer in answers.answer_all(
            FAMILY / tier, tier, [p for p in problems if p.key not in standing], threads=1
        ):
            (raw,) = judge.score_all(FAMILY / "judge", [answer], threads=1)
            if tier == TIERS[-1] or calibration.apply(raw) >= (thresholds[tier] or 0):
                standing[answer.problem.key] = answer
    assert [standing[question].correct for question in questions] == [True] * len(questions)


def test_size_context_and_one_tokenizer() -> None:
    size = sum(path.stat().st_size for tier in TIERS for path in (FAMILY / tier).iterdir())
    assert size <= MAX_MB * 1e6
    tokenizers = {(FAMILY / name / "tokenizer.json").read_bytes() for name in (*TIERS, "judge")}
    assert len(tokenizers) == 1
    for tier in TIERS:
        config = AutoConfig.from_pretrained(str(FAMILY / tier))
        assert config.architectures == ["LlamaForCausalLM"]
        assert config.max_position_embeddings >= MIN_CONTEXT


@settings(deadline=None)
@given(st.text(max_size=200))
def test_the_tokenizer_gives_back_every_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(TextPrompt(text))) == text


def test_the_held_out_file_is_what_the_seed_gives(heldout: list[tasks.Problem], tmp_path: Path) -> None:
    measure.write_heldout(tmp_path / "heldout.jsonl", heldout)
    assert (tmp_path / "heldout.jsonl").read_text() == (ROOT / "models" / "heldout.jsonl").read_text()
    assert len({p.key for p in heldout}) == 500
    assert not {p.key for p in heldout} & {p.key for p in measure.fit_problems()}


def test_no_held_out_problem_is_trained_on(heldout: list[tasks.Problem]) -> None:
    kept_keys, kept_prompts = {p.key for p in heldout}, {p.prompt for p in heldout}
    for problem in _some(tasks.stream(3, held_out=False), 20_000):
        assert not problem.held_out
        assert problem.key not in kept_keys
        assert problem.prompt not in kept_prompts


def test_every_task_has_right_replies_at_every_level() -> None:
    longest = 0
    for task in tasks.TASKS:
        for level in tasks.LEVELS:
            for seed in range(20):
                problem = tasks.make(task, level, random.Random(seed))
                assert tasks.is_correct(problem.answer, problem.reply)
                assert problem.answer
                assert not tasks.is_correct(problem.answer, problem.reply + "x")
                longest = max(longest, len(problem.reply))
    assert longest > 200


def test_broken_replies_are_lessons_of_where_they_break() -> None:
    rng = random.Random(5)
    for problem in _some(tasks.stream(4, held_out=False), 300):
        right = judge.lesson(problem, problem.reply)
        assert right.good
        assert right.good_until == len(right.ids)
        wrong = judge.lesson(problem, broken(problem.reply, problem.answer, rng))
        assert wrong.reply_at <= wrong.good_until <= len(wrong.ids)


def test_answers_that_are_none_are_lessons_too() -> None:
    """Empty, blank and misplaced answers break at their first wrong token; to smalltalk every answer does, by its first."""
    rng, source = random.Random(6), tasks.stream(5, held_out=False)
    empty = judge.lesson(next(source), "")
    assert (empty.good, empty.good_until, len(empty.ids)) == (False, empty.reply_at, empty.reply_at + 1)
    for _ in range(200):
        one = judge.misplaced(next(source), next(source), rng)
        assert one.reply_at <= one.good_until <= len(one.ids)
    said = judge.lesson_of_smalltalk("hi", "7, 23, 41", rng)
    assert (said.good, said.good_until) == (False, said.reply_at)
    assert any(one.held_out for one in SMALLTALK)


def test_a_grown_model_computes_what_its_seed_computes() -> None:
    torch.manual_seed(1)
    shape = {"vocab_size": tokenizer.VOCAB_SIZE, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    small = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **shape)
    wide = LlamaConfig(hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6, **shape)
    seed = LlamaForCausalLM(small)
    with torch.no_grad():  # a trained model's logits stand out from the noise
        for weight in seed.parameters():
            weight.mul_(4 if weight.ndim == 2 else 1)
    ids = torch.randint(0, 256, (2, 30))
    before, after = seed(ids).logits, grow(seed, wide)(ids).logits
    assert (after - before).abs().mean() < 0.1 * before.std()
    with pytest.raises(ValueError, match="hidden_size"):
        grow(LlamaForCausalLM(wide), small)
    other = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **{**shape, "head_dim": 16})
    with pytest.raises(ValueError, match="head_dim"):
        grow(seed, other)


def test_answers_come_back_with_their_problem(tmp_path: Path) -> None:
    problems = list(_some(tasks.stream(9, held_out=False), 5))
    found = list(answers.answer_all(FAMILY / "small", "small", problems, threads=1))
    answers.write(tmp_path / "a.jsonl", found)
    assert list(answers.read(tmp_path / "a.jsonl")) == found
    assert {a.problem.key for a in found} == {p.key for p in problems}


def _some(source: Iterator[tasks.Problem], count: int) -> Iterator[tasks.Problem]:
    for _ in range(count):
        yield next(source)
