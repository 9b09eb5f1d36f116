"""Scorers, calibration, and `python -m penstock.judge_service.calibrate`."""

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.judge_service.calibrate import calibrate, read_samples
from penstock.judge_service.calibration.fitted import CalibrationError
from penstock.judge_service.calibration.isotonic import Calibration, fit
from penstock.judge_service.scorers.confidence import ConfidenceScorer
from penstock.judge_service.scorers.exact import ExactScorer
from penstock.judge_service.scorers.llm.extension import LlmScorer
from penstock.judge_service.scorers.llm.openai_chat import OpenAiChat
from penstock.judge_service.scoring.comparison import last_number
from penstock.judge_service.scoring.questions import REPLY_TOKENS
from penstock.judge_service.scoring.registry import RegisteredScorer, ScorerRegistry
from penstock.services.domain.errors import InvalidRequest, NotFound, RequestFailed, Unavailable
from penstock.services.field_problems import SettingsError
from penstock.types.judging import JudgedAnswer, LogprobSummary, ScorerInfo
from penstock.types.prompts import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from tests.conftest import MeshFileMaker
from tests.judge.test_grading import choice
from tests.support.local_http import served

QUESTION = ChatPrompt((ChatMessage("user", "What is 2 + 2?"),))


def judged(answer: str, reference: str | None = None, mean: float | None = None) -> JudgedAnswer:
    summary = LogprobSummary(3, mean, mean) if mean is not None else None
    return JudgedAnswer(QUESTION, answer, logprobs=summary, reference=reference)


@pytest.mark.parametrize(
    ("compare", "answer", "reference", "right"),
    [
        ("text", " four ", "four", True),
        ("text", "Four", "four", False),
        ("final-answer", "2+2=4\nAnswer: 4", "4", True),
        ("final-answer", "Answer: 5\nno, Answer: 4", "Answer: 4", True),
        ("final-answer", "it is 4", "4", False),
        ("number", "it is 4.0, I think", "4", True),
        ("number", "1,204 apples", "1204", True),
        ("number", "none", "4", False),
        ("number", "-3e2", "-300", True),
    ],
)
async def test_exact_scorers_compare(compare: Any, answer: str, reference: str, right: bool) -> None:
    (found,) = await ExactScorer(compare).score([judged(answer, reference)])
    assert found.score == (100.0 if right else 0.0)


async def test_what_a_scorer_needs_is_asked_for_by_field() -> None:
    with pytest.raises(InvalidRequest, match=r"items\[1\].reference"):
        await ExactScorer("text").score([judged("4", "4"), judged("4")])
    with pytest.raises(InvalidRequest, match=r"items\[0\].logprobs"):
        await ConfidenceScorer().score([judged("4")])
    with pytest.raises(InvalidRequest, match="mean_logprob"):
        await ConfidenceScorer().score([judged("4", mean=0.5)])


async def test_confidence_is_the_mean_probability() -> None:
    low, high = await ConfidenceScorer().score([judged("a", mean=-2.0), judged("b", mean=-0.1)])
    assert math.isclose(high.score, 100 * math.exp(-0.1))
    assert low.raw < high.raw


@pytest.mark.slow
@given(st.text(max_size=40))
def test_reading_a_number_never_fails(text: str) -> None:
    value = last_number(text)
    assert value is None or isinstance(value, float)


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """A chat-completions endpoint that answers as told: (base URL, requests seen, the answer)."""
    seen: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"status": 200, "body": {"choices": [choice({"9": 0.6, "3": 0.4})]}}

    async def complete(request: web.Request) -> web.Response:
        seen.append({**await request.json(), "authorization": request.headers.get("Authorization")})
        return web.Response(status=answer["status"], text=json.dumps(answer["body"]), content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with served(app) as url:
        yield f"{url}/v1", seen, answer


async def test_a_language_model_grades(endpoint: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> None:
    url, seen, answer = endpoint
    scorer = LlmScorer(
        OpenAiChat(url, "judge-7b", api_key="secret", timeout_s=30, max_tokens=REPLY_TOKENS), concurrency=2
    )
    await scorer.start()
    try:
        found = await scorer.score([judged("4"), judged("5"), judged("6")])
        assert found[0].raw == pytest.approx(9 * 0.6 + 3 * 0.4)
        assert found[0].score == pytest.approx(100 * found[0].raw / 9)
        assert len(seen) == 3
        assert seen[0]["model"] == "judge-7b"
        assert seen[0]["logprobs"] is True
        assert seen[0]["authorization"] == "Bearer secret"
        assert "What is 2 + 2?" in seen[0]["messages"][1]["content"]
        for status, body in ((500, {}), (500, "What is 2"), (200, {"choices": []}), (200, {"choices": [7]})):
            answer |= {"status": status, "body": body}
            with pytest.raises(Unavailable) as caught:
                await scorer.score([judged("4")])
            assert "What is" not in str(caught.value), "errors are logged: they quote neither prompt nor reply"
        answer |= {"status": 200, "body": {"choices": [{"message": {"content": "What is this?"}}]}}
        with pytest.raises(
            RequestFailed, match="no grade"
        ) as failed:  # the judge is well: others of its answers have grades
            await scorer.score([judged("4")])
        assert "What is" not in str(failed.value)
    finally:
        await scorer.close()


def test_calibration_learns_the_share_of_good_answers() -> None:
    """Scores whose truth is known: after calibration 70 means 70 in a hundred."""
    rng = np.random.default_rng(3)
    raw = rng.normal(0, 2, 20_000)
    truth = 1 / (1 + np.exp(-(1.7 * raw - 1)))
    good = rng.random(20_000) < truth
    uncalibrated = 100 / (1 + np.exp(-raw))
    made = fit(raw[:10_000].tolist(), good[:10_000].tolist(), uncalibrated[:10_000].tolist())
    scores = np.array([made.apply(x) for x in raw[10_000:]])
    assert made.brier < made.brier_before
    for low, high in ((10, 30), (30, 50), (50, 70), (70, 90)):
        inside = (scores >= low) & (scores < high)
        assert abs(good[10_000:][inside].mean() * 100 - scores[inside].mean()) < 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-50, 50), st.booleans()), min_size=20, max_size=60))
def test_calibration_is_monotone_and_bounded(samples: list[tuple[float, bool]]) -> None:
    raw, good = [r for r, _ in samples], [g for _, g in samples]
    if all(good) or not any(good):
        with pytest.raises(CalibrationError):
            fit(raw, good, [50.0] * len(raw))
        return
    made = fit(raw, good, [50.0] * len(raw))
    scores = [made.apply(x) for x in sorted([*raw, -1e9, 1e9])]
    assert scores == sorted(scores)
    assert scores[0] >= 0
    assert scores[-1] <= 100


def test_calibration_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    made = fit([float(i) for i in range(40)], [i > 20 for i in range(40)], [50.0] * 40)
    made.write(path)
    assert Calibration.read(path) == made
    for broken in ("{", "{}", json.dumps({**json.loads(path.read_text()), "score": [9, 1], "raw": [0, 1]})):
        path.write_text(broken)
        with pytest.raises(CalibrationError, match=r"calibration.json"):
            Calibration.read(path)
    with pytest.raises(CalibrationError, match="20"):
        fit([1.0], [True], [50.0])


async def test_a_panel_knows_its_scorers() -> None:
    calibration = Calibration((0.0, 1.0), (20.0, 60.0), 20, 0.1, 0.2)
    registry = ScorerRegistry(
        [
            RegisteredScorer(ScorerInfo("a"), ExactScorer("text"), calibration),
            RegisteredScorer(ScorerInfo("b"), ConfidenceScorer(), None),
        ],
        "a",
    )
    name, (result,) = await registry.judge("", [judged("4", "4")])
    assert (name, result.score, result.raw) == ("a", 60.0, 1.0)
    assert (await registry.judge("b", [judged("4", mean=0.0)]))[1][0].score == 100.0
    with pytest.raises(NotFound):
        await registry.judge("c", [])


async def test_token_prompts_cannot_be_read_by_a_language_model() -> None:
    scorer = LlmScorer(
        OpenAiChat("http://127.0.0.1:9/v1", "x", api_key=None, timeout_s=30, max_tokens=REPLY_TOKENS), concurrency=1
    )
    await scorer.start()
    with pytest.raises(InvalidRequest, match="token_ids"):
        await scorer.score([JudgedAnswer(TokenPrompt((1,)), "x")])
    with pytest.raises(Unavailable):
        await scorer.score([JudgedAnswer(TextPrompt("a"), "x")])
    await scorer.close()


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", ":2: "),
        ({"prompt": "p"}, ":2: answer: Field required"),
        ({"prompt": "p", "answer": "a", "good": "yes"}, "good"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, said: str) -> None:
    good = {"prompt": "p", "answer": "a", "good": True}
    with pytest.raises(CalibrationError, match=said):
        read_samples(write(tmp_path / "samples.jsonl", [good, row]))


async def test_unknown_scorers_and_too_few_samples_are_refused(tmp_path: Path, mesh_file: MeshFileMaker) -> None:
    samples = write(tmp_path / "s.jsonl", [{"prompt": "p", "answer": "a", "mean_logprob": -1, "good": True}])
    with pytest.raises(SettingsError, match="vibes"):
        await calibrate(mesh_file(), "vibes", samples, tmp_path / "out")
    with pytest.raises(CalibrationError):
        await calibrate(mesh_file(), "confidence", samples, tmp_path / "out")
