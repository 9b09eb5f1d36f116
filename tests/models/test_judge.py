"""The judge and the figures: what a figure says, and that judging is the code that serves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.training import answers, cards, judge, learning, measure, tasks, tokenizer
from models.training.answers import Answered
from models.training.problems import Problem
from models.training.train import Run
from penstock.judge_service.calibration.isotonic import Calibration
from penstock.services.score_predictor_file import read_score_predictor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the family's tokenizer, under every tier's name."""
    root = tmp_path_factory.mktemp("second")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=256,
        eos_token_id=257, pad_token_id=258,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name in (*measure.TIERS, "judge", judge.BASE):
        learning.save(model, root / name, tokenizer.save)
    return root


def test_the_least_likely_token_is_what_the_served_judge_says(folder: Path) -> None:
    """Chats with tools and several turns too."""
    some = [tasks.make(task, 2, "7") for task in ("add", "tools", "follow_list", "smalltalk", "form")]
    given = [Answered(one, "small", one.reply, len(one.reply)) for one in some]
    rows = answers.logprobs_all(folder / "judge", given, threads=1)
    assert [len(row) for row in rows] == [len(one.reply.encode()) + 1 for one in some]
    assert [min(row) for row in rows] == pytest.approx(answers.score_all(folder / "judge", given, threads=1), abs=1e-3)


@pytest.mark.slow
def test_the_family_is_measured_and_installed_whole_or_not_at_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures, held-out prompts, calibrations and cards agree; without a judge nothing is replaced."""
    monkeypatch.setattr(measure, "TEST_COUNT", 6)
    monkeypatch.setattr(measure, "FIT_COUNT", 12)
    monkeypatch.setattr(measure, "COST_ROUNDS", 1)
    monkeypatch.setattr(measure, "PREDICTOR_PROMPTS", 120)
    monkeypatch.setattr(measure, "answer_all", _half_right)
    recipe = {"grows_from": "first/small", "seed": 31}
    trained = {"parameters": 115_520, "training_tokens": 50e6, "steps": 9, "cpu_s": 60, "threads": 2, "recipe": recipe}
    for tier in measure.TIERS:
        (folder / f"{tier}.figures.json").write_text(json.dumps(trained))
    (folder / f"{judge.BASE}.figures.json").write_text(json.dumps(trained))
    (folder / judge.BASE / "progress.json").write_text("{}")
    (folder / "judge.figures.json").write_text(json.dumps(judge.make(folder)))
    figures = measure.measure(folder, 1)
    assert json.loads((folder / "figures.json").read_text()) == figures
    assert set(figures["step_cost_ms"]) == set(measure.TIERS)
    assert figures["tiers"]["small"]["right"].count("1") / 6 == figures["tiers"]["small"]["accuracy"]
    for calibration in (folder / "judge" / "calibration.json", folder / measure.CONFIDENCE):
        assert Calibration.read(calibration).samples == 24
    assert figures["margin"] in measure.MARGINS
    assert set(figures["margins"]) == {f"{margin:g}" for margin in measure.MARGINS}
    rows = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == [p.answer for p in measure.heldout_problems()]
    family = tmp_path / "models" / "family"
    family.mkdir(parents=True)
    cards.install(folder, family)
    for tier in measure.TIERS:
        card = (family / tier / "README.md").read_text()
        assert f"{100 * figures['tiers'][tier]['accuracy']:.1f} %" in card
        assert "seed 31" in card
    card = (family / "judge" / "README.md").read_text()
    assert all(name in card for name in measure.ROWS)
    assert f"{figures['judge']['small']['brier']:.3f}" in card
    assert "wrong among accepted" in (family / "README.md").read_text()
    assert read_score_predictor(family / "predictor.json").tiers == measure.TIERS[:-1]
    weights = [(place / "model.safetensors").read_bytes() for place in (folder / judge.BASE, family / "judge")]
    assert weights[0] == weights[1]
    assert not (family / "judge" / "progress.json").exists()
    assert (tmp_path / "models" / "heldout.jsonl").read_bytes() == (folder / "heldout.jsonl").read_bytes()
    _take_up(family, tmp_path / "new", trained)
    (folder / "judge" / "config.json").rename(folder / "gone.json")
    before = (family / "figures.json").read_bytes()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        cards.install(folder, family)
    assert (family / "figures.json").read_bytes() == before
    assert (family / "judge" / "config.json").exists()


def _take_up(family: Path, work: Path, trained: dict[str, Any]) -> None:
    """A training begins with what is installed: one tier goes on, the others are finished."""
    cards.take_up(family, work, ("large",))
    finished = {path.name.removesuffix(".figures.json") for path in work.glob("*.figures.json")}
    assert finished == {"small", "medium", judge.BASE}
    assert json.loads((work / "small.figures.json").read_text()) == trained
    assert json.loads((work / "large" / "progress.json").read_text()) == trained
    run = Run("large", work, 1)
    assert (run.step, run.seen, run.begun_at_step) == (trained["steps"], trained["training_tokens"], trained["steps"])
    installed = LlamaForCausalLM.from_pretrained(str(family / "large"), dtype=torch.float32)
    for one, other in zip(run.model.parameters(), installed.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(FileExistsError):
        cards.take_up(family, work)


def _half_right(folder: Path, tier: str, problems: list[Problem], *, threads: int) -> list[Answered]:
    """In place of a trained tier: every other reply is right, so that there is something to fit and to rank."""
    return [Answered(p, tier, p.reply if i % 2 else "?", len(p.reply)) for i, p in enumerate(problems)]
