"""Answers that score 0 whatever the scorer is."""

from collections.abc import Sequence as Seq

import pytest

from judge_service.calibration import Calibration
from judge_service.scorer_registry import RegisteredScorer, ScorerRegistry
from judge_service.scorers import JudgedAnswer, LogprobSummary, RawScore
from judge_service.scorers.confidence import ConfidenceScorer
from judge_service.scorers.exact import ExactScorer
from services.domain import ChatMessage, ChatPrompt, InvalidRequest

GENEROUS = Calibration((-9.0, 0.0), (60.0, 100.0), samples=20, brier=0.0, brier_before=0.0)


class CountingScorer(ConfidenceScorer):
    """A confidence scorer that keeps what it was asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        self.asked += [item.answer for item in answers]
        return await super().score(answers)


def judged(answer: str, *, mean: float | None = -0.1) -> JudgedAnswer:
    summary = LogprobSummary(3, mean, mean) if mean is not None else None
    return JudgedAnswer(ChatPrompt((ChatMessage("user", "hi"),)), answer, logprobs=summary, reference="")


@pytest.mark.parametrize("answer", ["", " ", "\n\t \n", "\u00a0\u2003"])
async def test_an_empty_answer_scores_nothing_and_no_scorer_is_asked(answer: str) -> None:
    """Not even a calibration that is kind to everything, or a reference that is empty too, lifts it."""
    scorer = CountingScorer()
    registry = ScorerRegistry(
        [RegisteredScorer("sure", scorer, GENEROUS), RegisteredScorer("exact", ExactScorer("text"), None)], "sure"
    )
    for name in ("sure", "exact"):
        _, (result,) = await registry.judge(name, [judged(answer)])
        assert (result.score, result.raw, result.reason) == (0.0, 0.0, "empty_answer")
    assert scorer.asked == []


async def test_answers_beside_an_empty_one_are_scored_in_their_places() -> None:
    scorer = CountingScorer()
    registry = ScorerRegistry([RegisteredScorer("sure", scorer, None)], "sure")
    _, results = await registry.judge("", [judged(""), judged("a", mean=-0.5), judged(" "), judged("b", mean=-0.1)])
    assert scorer.asked == ["a", "b"]
    assert [result.reason for result in results] == ["empty_answer", "", "empty_answer", ""]
    assert [result.raw for result in results] == [0.0, -0.5, 0.0, -0.1]


async def test_an_error_names_the_item_as_the_request_counts_it() -> None:
    registry = ScorerRegistry([RegisteredScorer("sure", ConfidenceScorer(), None)], "sure")
    with pytest.raises(InvalidRequest, match=r"items\[3\]\.logprobs"):
        await registry.judge("", [judged(""), judged("a"), judged(""), judged("b", mean=None)])
