"""Skip prediction where it is planned: training, routing under a rule, plans."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.skip_rule import cheapest_rule, mean_cost
from penstock.planner_service.codecs.plan_file import read_plan
from penstock.planner_service.question.score_predictor import LEAST_PROMPTS, calibration_error, train
from penstock.planner_service.routing.quality import route
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.score_prediction import ScorePredictor
from penstock.services.score_predictor_file import read_score_predictor
from penstock.types.rules import AcceptanceRules
from tests.conftest import ROOT
from tests.support.cli import penstock as run
from tests.support.inputs import read_quality
from tests.support.judged_samples import TIERS, judged_sample
from tests.support.present import present
from tests.support.questions import asked
from tests.support.tables import judged_header, write_table, write_trace

EASY, HARD = ("upper", "reverse", "copy"), ("multiply", "sort", "translate")


def prompts(count: int, seed: int = 1) -> tuple[list[str], np.ndarray]:
    """Prompts whose first word decides how well each tier does, with noise; scores (N, C)."""
    rng = np.random.default_rng(seed)
    texts, scores = [], []
    for _ in range(count):
        word = str(rng.choice(EASY + HARD))
        texts.append(f"{word} {rng.integers(10, 99)} and {rng.integers(10, 99)}")
        right = (0.9, 0.95, 0.98) if word in EASY else (0.1, 0.6, 0.97)
        scores.append([100.0 * (rng.random() < share) for share in right])
    return texts, np.array(scores)


def test_the_cheapest_rule_costs_no_quality() -> None:
    judged, thresholds, price = judged_sample(3, count=300), (60.0, 60.0), (1.0, 4.0, 10.0)
    plain = route(judged, thresholds)
    rule = cheapest_rule(judged, thresholds, price, plain.quality)
    routed = route(judged.under(AcceptanceRules(skip_below=rule.limits)), thresholds)
    assert (rule.quality, rule.cost) == (routed.quality, mean_cost(judged, routed, price))
    assert rule.quality >= plain.quality
    assert rule.cost < mean_cost(judged, plain, price)
    unreachable = cheapest_rule(judged, thresholds, price, 101.0)
    assert unreachable.quality >= rule.quality


def test_training_finds_what_the_prompts_tell_and_is_calibrated() -> None:
    """On new prompts: hard ones are told from easy ones, and the mean of the predictions is that of the scores."""
    texts, scores = prompts(1200)
    trained = train(texts, TIERS, scores)
    assert trained.predictor.auc[0] > 0.85
    assert trained.log_loss[0] < 0.6 * trained.constant_loss[0]
    assert max(trained.calibration_error) < 4
    fresh, fresh_scores = prompts(1200, seed=2)
    predicted = np.array([[trained.predictor.predict(text)[t] for t in TIERS] for text in fresh])
    hard = np.array([text.split()[0] in HARD for text in fresh])
    for group in (hard, ~hard):
        assert predicted[group].mean(axis=0) == pytest.approx(
            fresh_scores[group].mean(axis=0), abs=9
        )  # 3 standard errors
    assert predicted[hard, 0].max() < predicted[~hard, 0].min()


def test_the_calibration_error_is_by_how_many_points_predictions_are_wrong_on_average() -> None:
    scores = np.tile([0.0, 100.0], 100)
    assert calibration_error(np.full(200, 50.0), scores) == 0.0
    assert calibration_error(np.full(200, 80.0), scores) == pytest.approx(30.0)
    half_right = np.where(np.arange(200) < 100, 20.0, 50.0)
    assert calibration_error(half_right, scores) == pytest.approx(15.0)


def test_a_prompt_is_not_predicted_by_a_model_that_has_seen_it() -> None:
    """Scores that are pure chance cannot be predicted, however often a prompt is repeated."""
    rng = np.random.default_rng(5)
    texts = [f"word{i // 4}" for i in range(800)]
    scores = np.repeat(100.0 * (rng.random((200, 1)) < 0.5), 4, axis=0)
    trained = train(texts, ["only"], scores)
    assert abs(trained.predictor.auc[0] - 0.5) < 0.1


def test_too_few_prompts_are_refused() -> None:
    texts, scores = prompts(300)
    with pytest.raises(InvalidRequest, match=f"at least {LEAST_PROMPTS}"):
        train(["same"] * 300, TIERS, scores)
    with pytest.raises(InvalidRequest, match="quality"):
        train(texts, TIERS, scores[:, :2])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Prompts with their quality file, as `penstock measure` writes it, and a trace."""
    folder, rng = tmp_path_factory.mktemp("skip"), np.random.default_rng(3)
    texts, scores = prompts(300)
    paths = {
        name: folder / name for name in ("prompts.jsonl", "judged.csv", "trace.csv", "predictor.json", "predicted.csv")
    }
    paths["prompts.jsonl"].write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    rows = ([200, *(cell for score in row for cell in (int(rng.integers(100, 400)), score))] for row in scores.tolist())
    write_table(paths["judged.csv"], judged_header(TIERS), rows)
    write_trace(paths["trace.csv"], ((f"{at:.4f}", 200, 200) for at in np.cumsum(rng.exponential(0.1, 300))))
    return paths


def plan(files: dict[str, Path], quality: str, *more: object, **fields: Any) -> Any:
    examples = ROOT / "examples"
    site = ("--cluster", examples / "cluster-1x8-h100.yaml", "--models", examples / "qwen2.5-cascade.yaml")
    work = ("--trace", files["trace.csv"], "--quality", files[quality])
    short = asked(requests=100, runs=0, objective="largest-tier", **fields)
    return run("plan", *site, *work, *short, "--min-quality", 85, *more)


@pytest.mark.slow
def test_from_measured_prompts_to_a_plan_that_passes_tiers_over(files: dict[str, Path], tmp_path: Path) -> None:
    """`predictor` writes the file for routers and the columns for the rule `skip`, whose plan is no slower."""
    made = run(
        "predictor", files["prompts.jsonl"], files["judged.csv"], "--out", files["predictor.json"], "--quality-out",
        files["predicted.csv"], "--json",
    )  # fmt: skip
    assert made.returncode == 0, made.output
    assert json.loads(made.stdout)["tiers"][0]["auc"] > 0.85
    predictor: ScorePredictor = read_score_predictor(files["predictor.json"])
    assert predictor.predict("multiply 12 and 30")["small"] < 40 < predictor.predict("upper 12 and 30")["small"]
    plans = {}
    for name, fields in (("without", {}), ("with", {"rules": {"skip": True}})):
        out = tmp_path / f"{name}.json"
        result = plan(files, "predicted.csv", "--out", out, **fields)
        assert result.returncode == 0, result.output
        plans[name] = json.loads(out.read_text())
    assert plans["without"]["skip_below"] == [None, None]
    assert plans["with"]["latency_p95_s"] <= plans["without"]["latency_p95_s"] + 1e-9
    assert plans["with"]["quality"] >= 85
    read = read_plan(tmp_path / "with.json").plan
    assert [tier.skip_below for tier in read.tiers[:-1]] == plans["with"]["skip_below"]
    if any(plans["with"]["skip_below"]):
        assert plans["with"]["optimality"]["proof"] == "searched"
        assert plans["with"]["optimality"]["gap"] is None
    replayed = run("simulate", "--plan", tmp_path / "with.json", "--trace", files["trace.csv"], "--json")
    assert replayed.returncode == 0, replayed.output


def test_a_predictor_that_exists_predicts_for_other_prompts(files: dict[str, Path], tmp_path: Path) -> None:
    """`predictor --from` adds its predictions to a quality file, those of routers; it trains nothing."""
    source, judged = tmp_path / "shipped.json", files["judged.csv"]
    made = run("predictor", files["prompts.jsonl"], judged, "--out", source)
    assert made.returncode == 0, made.output
    out, trained = tmp_path / "predicted.csv", tmp_path / "predictor.json"
    command = ["predictor", files["prompts.jsonl"], judged, "--from", source]
    done = run(*command, "--quality-out", out, "--json")
    assert done.returncode == 0, done.output
    assert json.loads(done.stdout)["out"] == str(out)
    assert not trained.exists()
    predictor = read_score_predictor(source)
    texts = [json.loads(line)["prompt"] for line in files["prompts.jsonl"].read_text().splitlines()]
    found = read_quality(out, TIERS)
    expected = [[predictor.predict(text)[tier] for tier in TIERS] for text in texts]
    assert present(found.predicted) == pytest.approx(np.array(expected), rel=1e-3)
    assert found.scores.tolist() == read_quality(judged, TIERS).scores.tolist()
    refused = run(*command)
    assert (refused.returncode, "--quality-out" in refused.output) == (2, True)
    for option, value in (("--out", trained), ("--seed", 3)):  # they do nothing without training
        refused = run(*command, "--quality-out", out, option, value)
        assert (refused.returncode, f"{option}: " in refused.output) == (2, True)
    source.write_text("{}")
    refused = run(*command, "--quality-out", out)
    assert (refused.returncode, "shipped.json" in refused.output) == (2, True)


def test_what_is_missing_is_named(files: dict[str, Path]) -> None:
    result = plan(files, "judged.csv", rules={"skip": True})
    assert result.returncode == 2
    assert "predicted_score" in result.output
    result = run("predictor", files["prompts.jsonl"], files["trace.csv"])
    assert result.returncode == 2
    assert "_judge_score" in result.output
