"""Predicted scores: features, the file, the rule by which a tier is passed over. Pure."""

import json

import pytest

from penstock.services.acceptance import pipeline
from penstock.services.acceptance.skip_prediction import passes_over
from penstock.services.domain.score_prediction import (
    PredictorError,
    ScorePredictor,
    expected_score,
    features,
    prompt_text,
)
from penstock.types.plans import TierPlan
from penstock.types.prompts import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from penstock.types.rules import SkipFor

BUCKETS = 512
HARD = features("multiply", BUCKETS)[0]


def predictor() -> ScorePredictor:
    return ScorePredictor(("small", "large"), BUCKETS, (2.0, 3.0), {HARD: (-4.0, -0.5)}, 100, (0.9, 0.8))


def test_features_are_the_same_in_every_process_and_do_not_depend_on_digits() -> None:
    """Plans and files outlive processes; sums of other numbers are equally hard."""
    assert features("Add 12 and 30", BUCKETS) == features("add 45 and 67", BUCKETS)
    assert features("Add 12 and 30", BUCKETS) != features("Add 12 and 3000", BUCKETS)
    assert features("Add 12", 2**14) == sorted(features("Add 12", 2**14))
    assert features("", BUCKETS) == features("", BUCKETS)


def test_a_prediction_is_the_logit_of_the_features_that_are_known() -> None:
    found = predictor().predict("multiply")
    assert found == {"small": expected_score(-2.0), "large": expected_score(2.5)}
    assert expected_score(0.0) == 50.0
    assert expected_score(-1e9) >= 0.0
    assert expected_score(1e9) <= 100.0


def test_a_prediction_reads_no_more_of_a_longer_prompt() -> None:
    """What it costs is bounded, as are the features."""
    long, longer = (len(features(" ".join(f"word{i} 33," for i in range(n)), 2**16)) for n in (20_000, 200_000))
    assert 100 < long <= longer < long + 10  # sizes of the text are features, too


def test_the_file_gives_back_the_predictor() -> None:
    assert ScorePredictor.from_json(predictor().to_json()) == predictor()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format"),
        ({"tiers": []}, "tiers"),
        ({"tiers": ["small", "small"]}, "tiers: a name occurs twice"),
        ({"buckets": 0}, "buckets"),
        ({"buckets": True}, "buckets"),
        ({"intercepts": [1.0]}, "intercepts: must be 2 numbers"),
        ({"weights": {"9999": [1, 2]}}, "weights: '9999'"),
        ({"weights": {"1": [1, "x"]}}, "weights.1: must be finite numbers"),
        ({"weights": {"1": [1, float("nan")]}}, "weights.1: must be finite numbers"),
        ({"samples": None}, "samples"),
    ],
)
def test_what_is_no_predictor_is_refused_by_its_field(change: dict[str, object], message: str) -> None:
    data = json.loads(predictor().to_json()) | change
    with pytest.raises(PredictorError, match=message):
        ScorePredictor.from_json(json.dumps(data))
    with pytest.raises(PredictorError, match="not JSON"):
        ScorePredictor.from_json("{")


def test_only_a_known_score_below_the_limit_passes_a_tier_over() -> None:
    assert passes_over(29.9, 30.0)
    assert not passes_over(30.0, 30.0)
    assert not passes_over(None, 30.0)
    assert not passes_over(0.0, None)


@pytest.mark.parametrize(
    ("predicted", "asked"),
    [
        ({"small": 70.0, "large": 90.0}, False),
        ({"small": 70.0, "large": 80.0}, True),
        ({"small": 70.0, "medium": 99.0, "large": 60.0}, True),
        ({"small": 70.0}, True),
        ({"large": 100.0}, True),
        ({}, True),
    ],
)
def test_a_tier_is_passed_over_for_one_whose_predicted_score_is_higher_by_more_than_the_gain(
    predicted: dict[str, float], asked: bool
) -> None:
    tier = TierPlan("small", "m", 0.0, 1, skip_for=SkipFor("large", 10.0))
    assert pipeline.is_asked(tier, predicted) == asked


def test_the_text_is_that_of_the_last_message() -> None:
    chat = ChatPrompt((ChatMessage("system", "be brief"), ChatMessage("user", "hello")))
    assert prompt_text(chat) == "hello"
    assert prompt_text(TextPrompt("text")) == "text"
    assert prompt_text(TokenPrompt((1, 2))) is None
