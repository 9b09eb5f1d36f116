"""Skip prediction and early checks where they are planned: training, routing under a rule, plans, errors that are stated."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from planner_service.early_checks import EarlyRule, checked_answers, fit_early_checks
from planner_service.files import read_quality
from planner_service.plan_file import read_plan
from planner_service.routing.quality import JudgedSample, all_qualities, route
from planner_service.routing.skip_rule import cheapest_rule, mean_cost
from planner_service.score_predictor import LEAST_PROMPTS, train
from services.domain.errors import InvalidRequest
from services.domain.score_prediction import ScorePredictor, passes_over
from services.score_predictor_file import read_score_predictor
from tests.conftest import ROOT

TIERS = ("small", "medium", "large")
EASY, HARD = ("upper", "reverse", "copy"), ("multiply", "sort", "translate")


def sample(seed: int, count: int = 60) -> JudgedSample:
    """Random scores, few of them distinct, and predictions that know something of them."""
    rng = np.random.default_rng(seed)
    scores = np.asarray(rng.integers(0, 6, (count, 3)) * 20.0, np.float64)
    predicted = np.asarray(np.clip(scores + rng.normal(0, 25, scores.shape), 0, 100), np.float64)
    return JudgedSample(TIERS, rng.integers(1, 50, count), rng.integers(1, 90, (count, 3)), scores, predicted)


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


@pytest.mark.parametrize("seed", range(20))
def test_routing_under_a_rule_is_what_a_router_does(seed: int) -> None:
    """One prompt after another by the router's own rule, against the arrays; and the grid of all thresholds against both."""
    judged, rng = sample(seed), np.random.default_rng(seed + 100)
    limits = tuple(None if rng.random() < 0.2 else float(rng.integers(5, 80)) for _ in range(2))
    skipping = judged.skipping(limits)
    thresholds = (float(rng.choice([0, 40, 101])), float(rng.choice([20, 60, 100])))
    routed = route(skipping, thresholds)
    assert judged.predicted is not None
    for i in range(len(judged)):
        answered = 2
        for tier in range(2):
            asked = thresholds[tier] <= 100 and not passes_over(judged.predicted[i, tier], limits[tier])
            assert routed.processed[tier, i] == (asked and answered == 2)
            if asked and answered == 2 and judged.scores[i, tier] >= thresholds[tier]:
                answered = tier
        assert routed.answered[i] == answered
    levels, qualities = all_qualities(skipping)
    for a, b in rng.integers(0, [len(level) for level in levels], (20, 2)):
        assert qualities[a, b] == pytest.approx(route(skipping, (levels[0][a], levels[1][b])).quality)


def test_a_rule_needs_predictions_and_a_limit_for_each_tier_but_the_last() -> None:
    judged = sample(1)
    bare = JudgedSample(TIERS, judged.input_tokens, judged.output_tokens, judged.scores)
    assert bare.skipping((None, None)).passed_over is None
    with pytest.raises(InvalidRequest, match="predicted scores"):
        bare.skipping((30.0, None))
    with pytest.raises(InvalidRequest, match="skip_below"):
        judged.skipping((30.0,))


def test_the_cheapest_rule_costs_no_quality() -> None:
    judged, thresholds, price = sample(3, 300), (60.0, 60.0), (1.0, 4.0, 10.0)
    plain = route(judged, thresholds)
    rule = cheapest_rule(judged, thresholds, price, plain.quality)
    routed = route(judged.skipping(rule.limits), thresholds)
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
    fresh, fresh_scores = prompts(1200, seed=2)
    predicted = np.array([[trained.predictor.predict(text)[t] for t in TIERS] for text in fresh])
    hard = np.array([text.split()[0] in HARD for text in fresh])
    for group in (hard, ~hard):
        assert predicted[group].mean(axis=0) == pytest.approx(
            fresh_scores[group].mean(axis=0), abs=9
        )  # 3 standard errors
    assert predicted[hard, 0].max() < predicted[~hard, 0].min()


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


@pytest.mark.parametrize("error", [0.02, 0.1])
def test_early_checks_keep_their_error_and_reject_skipping_tiers(error: float) -> None:
    """The mean over many samples of the share of accepted answers that are rejected, on new answers, is at most the error."""
    rng, after = np.random.default_rng(1), (16, 64)
    shares, rejected_share = [], []

    def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
        good = rng.random(count) < 0.6
        first = np.where(good, rng.beta(8, 2, count), rng.beta(2, 4, count)) * 100
        later = np.minimum(first, np.where(good, rng.beta(8, 2, count), rng.beta(1, 6, count)) * 100)
        parts = np.stack([first, later], axis=1)
        parts[rng.random(count) < 0.3, 1] = np.nan  # these have ended by then
        return parts, good

    for _ in range(200):
        parts, good = drawn(300)
        checks = fit_early_checks(after, parts, good, error)
        new_parts, new_good = drawn(300)
        rejected = checked_answers(EarlyRule(checks), after, new_parts, np.full(300, 100)).rejected
        shares.append(rejected[new_good].mean())
        rejected_share.append(rejected[~new_good].mean())
    assert np.mean(shares) <= error + 2 * np.std(shares) / np.sqrt(len(shares))
    assert np.mean(shares) > error / 4, "no more cautious than it has to be"
    assert np.mean(rejected_share) > 0.4


def test_too_few_accepted_answers_reject_nothing_and_bad_input_is_named() -> None:
    parts = np.array([[50.0, 40.0], [90.0, 80.0], [95.0, np.nan]])
    assert fit_early_checks((8, 16), parts, np.array([False, True, True]), 0.01) == ()
    for arguments, field in (
        (((8,), parts, np.ones(3, np.bool_), 0.1), "part_scores"),
        (((8, 16), parts, np.ones(3, np.bool_), 0.0), "error"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            fit_early_checks(*arguments)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Prompts with their quality file, as `penstock measure` writes it, and a trace."""
    folder, rng = tmp_path_factory.mktemp("skip"), np.random.default_rng(3)
    texts, scores = prompts(300)
    paths = {
        name: folder / name for name in ("prompts.jsonl", "judged.csv", "trace.csv", "predictor.json", "predicted.csv")
    }
    paths["prompts.jsonl"].write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    with paths["judged.csv"].open("w", newline="") as file:
        table = csv.writer(file)
        columns = [f"{t}_{w}" for t in TIERS for w in ("output_tokens", "judge_score")]
        table.writerow(["prompt_id", "input_tokens", *columns])
        for i, row in enumerate(scores.tolist()):
            table.writerow([f"p{i}", 200, *(cell for score in row for cell in (int(rng.integers(100, 400)), score))])
    with paths["trace.csv"].open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["arrival_s", "input_tokens", "output_tokens"])
        for at in np.cumsum(rng.exponential(0.1, 300)):
            table.writerow([f"{at:.4f}", 200, 200])
    return paths


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def plan(files: dict[str, Path], quality: str, *more: object) -> Any:
    examples = ROOT / "examples"
    site = ("--cluster", examples / "cluster-1x8-h100.yaml", "--models", examples / "qwen2.5-cascade.yaml")
    work = ("--trace", files["trace.csv"], "--quality", files[quality], "--requests", 100, "--runs", 0)
    return run("plan", *site, *work, "--min-quality", 85, "--objective", "largest-tier", *more)


@pytest.mark.slow
def test_from_measured_prompts_to_a_plan_that_passes_tiers_over(files: dict[str, Path], tmp_path: Path) -> None:
    """`predictor` writes the file for routers and the columns for `plan --skip`, whose plan is no slower."""
    made = run(
        "predictor", files["prompts.jsonl"], files["judged.csv"], "--out", files["predictor.json"], "--quality-out",
        files["predicted.csv"], "--json",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["tiers"][0]["auc"] > 0.85
    predictor: ScorePredictor = read_score_predictor(files["predictor.json"])
    assert predictor.predict("multiply 12 and 30")["small"] < 40 < predictor.predict("upper 12 and 30")["small"]
    plans = {}
    for name, more in (("without", ()), ("with", ("--skip",))):
        out = tmp_path / f"{name}.json"
        result = plan(files, "predicted.csv", "--out", out, *more)
        assert result.exit_code == 0, result.output
        plans[name] = json.loads(out.read_text())
    assert plans["without"]["skip_below"] == [None, None]
    assert plans["with"]["latency_p95_s"] <= plans["without"]["latency_p95_s"] + 1e-9
    assert plans["with"]["quality"] >= 85
    assert read_plan(tmp_path / "with.json").skip_below == tuple(plans["with"]["skip_below"])
    if any(plans["with"]["skip_below"]):
        assert plans["with"]["optimality"]["proof"] == "searched"
        assert plans["with"]["optimality"]["gap"] is None
    replayed = run("simulate", "--plan", tmp_path / "with.json", "--trace", files["trace.csv"], "--json")
    assert replayed.exit_code == 0, replayed.output


def test_a_predictor_that_exists_predicts_for_other_prompts(files: dict[str, Path], tmp_path: Path) -> None:
    """`predictor --from` adds its predictions to a quality file, those of routers; it trains nothing."""
    source, judged = tmp_path / "shipped.json", files["judged.csv"]
    made = run("predictor", files["prompts.jsonl"], judged, "--out", source)
    assert made.exit_code == 0, made.output
    out, trained = tmp_path / "predicted.csv", tmp_path / "predictor.json"
    command = ["predictor", files["prompts.jsonl"], judged, "--from", source]
    done = run(*command, "--quality-out", out, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["out"] == str(out)
    assert not trained.exists()
    predictor = read_score_predictor(source)
    texts = [json.loads(line)["prompt"] for line in files["prompts.jsonl"].read_text().splitlines()]
    found = read_quality(out, TIERS)
    assert found.predicted is not None
    expected = [[predictor.predict(text)[tier] for tier in TIERS] for text in texts]
    assert found.predicted == pytest.approx(np.array(expected), rel=1e-3)
    assert found.scores.tolist() == read_quality(judged, TIERS).scores.tolist()
    refused = run(*command)
    assert (refused.exit_code, "--quality-out" in refused.output) == (2, True)
    for option, value in (("--out", trained), ("--seed", 3)):  # they do nothing without training
        refused = run(*command, "--quality-out", out, option, value)
        assert (refused.exit_code, f"{option}: " in refused.output) == (2, True)
    source.write_text("{}")
    refused = run(*command, "--quality-out", out)
    assert (refused.exit_code, "shipped.json" in refused.output) == (2, True)


def test_what_is_missing_is_named(files: dict[str, Path]) -> None:
    result = plan(files, "judged.csv", "--skip")
    assert result.exit_code == 2
    assert "predicted_score" in result.output
    result = run("predictor", files["prompts.jsonl"], files["trace.csv"])
    assert result.exit_code == 2
    assert "_judge_score" in result.output
