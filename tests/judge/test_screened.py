"""A scorer that is asked only where a cheap one is not sure."""

from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from penstock.judge_service.calibrate import calibrate
from penstock.judge_service.calibration.isotonic import Calibration
from penstock.judge_service.scorers.confidence import ConfidenceScorer
from penstock.judge_service.scorers.exact import ExactScorer
from penstock.judge_service.scorers.screened import ScreenedScorer
from penstock.judge_service.scoring.backlog import Backlog
from penstock.judge_service.scoring.interface import RawScore
from penstock.judge_service.scoring.registry import RegisteredScorer, ScorerRegistry
from penstock.proto.common.v1 import common_pb2
from penstock.proto.judge.v1 import judge_pb2 as pb
from penstock.services.domain.errors import InvalidRequest, Overloaded
from penstock.services.field_problems import SettingsError, joined
from penstock.services.mesh_check import check_mesh_file
from penstock.types.judging import JudgedAnswer, LogprobSummary
from penstock.types.prompts import TextPrompt
from tests.conftest import MeshFileMaker
from tests.support.mesh import served_judge
from tests.support.services import RedisProcess

HALVED = Calibration((0.0, 1.0), (0.0, 50.0), samples=20, brier=0.0, brier_before=0.0)
PARTS = [{"name": "sure", "kind": "confidence"}, {"name": "costly", "kind": "exact"}]


class Asked(ExactScorer):
    """An exact scorer that keeps what it was asked about."""

    def __init__(self) -> None:
        super().__init__("text")
        self.answers: list[str] = []

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        self.answers += [item.answer for item in answers]
        return await super().score(answers)


def judged(answer: str, mean: float | None, reference: str | None = "yes") -> JudgedAnswer:
    summary = None if mean is None else LogprobSummary(1, mean, mean)
    return JudgedAnswer(TextPrompt("?"), answer, logprobs=summary, reference=reference)


def screened(costly: ExactScorer, backlog: Backlog | None = None, margin: float = 10.0) -> ScorerRegistry:
    first = RegisteredScorer("sure", ConfidenceScorer(), None)
    second = RegisteredScorer("costly", costly, HALVED, backlog)
    return ScorerRegistry([first, second, ScreenedScorer("screened", first, second, margin)], "screened")


async def test_only_what_the_first_is_unsure_of_is_asked_again() -> None:
    """e^-0.05 is 95.1 %, e^-3 is 5.0 %: sure with a margin of 10. The scores are those of the scorers' own calibrations."""
    costly = Asked()
    answers = [judged("a", -0.05), judged("yes", -1.0), judged("", -1.0), judged("b", -3.0), judged("no", -2.0)]
    name, results = await screened(costly).judge("", answers)
    assert name == "screened"
    assert costly.answers == ["yes", "no"]
    assert [round(result.score, 1) for result in results] == [95.1, 50.0, 0.0, 5.0, 0.0]
    assert [result.raw for result in results] == [result.score for result in results]
    assert [result.reason for result in results] == ["", "", "empty_answer", "", ""]


async def test_an_answer_without_logprobs_is_for_the_second() -> None:
    """Not every remote tier has any. An error of the first names the answer of the request, too."""
    costly = Asked()
    answers = [judged("yes", None), judged("a", -0.05), judged("no", None)]
    _, results = await screened(costly).judge("", answers)
    assert costly.answers == ["yes", "no"]
    assert [round(result.score, 1) for result in results] == [50.0, 95.1, 0.0]
    assert [result.score for result in (await screened(costly).judge("", [judged("yes", None)]))[1]] == [50.0]
    with pytest.raises(InvalidRequest) as error:
        await screened(costly).judge("", [judged("yes", None), judged("a", 0.5)])
    assert [problem.field for problem in error.value.problems] == ["items[1].logprobs.mean_logprob"]


@pytest.mark.parametrize(("mean", "asked"), [(-0.1, True), (-0.0999, True), (-0.02, False), (-4.0, False)])
async def test_the_margin_says_of_what_the_first_is_sure(mean: float, asked: bool) -> None:
    costly = Asked()
    await screened(costly, margin=2.0).judge("", [judged("a", mean)])
    assert costly.answers == (["a"] if asked else [])


async def test_what_the_first_is_sure_of_needs_no_place_in_the_queue_of_the_second() -> None:
    backlog = Backlog(1, at_once=1)
    registry = screened(Asked(), backlog)
    with backlog.place(1, None):
        assert (await registry.judge("", [judged("a", -0.05)]))[1][0].score > 90
        with pytest.raises(Overloaded):
            await registry.judge("", [judged("a", -0.05), judged("a", -1.0)])
    assert backlog.answers == 0


async def test_an_error_names_the_answer_of_the_request() -> None:
    """Not its place among those that the guards or the first scorer left."""
    answers = [judged("", -1.0), judged("a", -0.05), judged("a", -1.0), judged("a", -1.0, reference=None)]
    with pytest.raises(InvalidRequest) as error:
        await screened(Asked()).judge("", answers)
    assert [problem.field for problem in error.value.problems] == ["items[3].reference"]


async def test_a_mesh_file_may_name_one(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """It is listed with what both need, and routers may make it the default."""
    scorers = [*PARTS, {"name": "screened", "kind": "screened", "scorers": ["sure", "costly"], "margin": 10}]
    file = mesh_file(judge={"scorers": scorers, "default_scorer": "screened"})
    logprobs = [pb.LogprobSummary(tokens=1, mean=mean, least=mean) for mean in (-0.05, -1.0, -1.0)]
    items = [
        pb.JudgedAnswer(
            prompt=common_pb2.Prompt(text="?"),
            answer=answer,
            reference="yes",
            logprobs=summary,
            finish_reason=common_pb2.FINISH_REASON_STOP,
        )
        for answer, summary in zip(("no", "yes", "no"), logprobs, strict=True)
    ]
    async with served_judge(file, redis.url) as (stub, _):
        response = await stub.Score(pb.ScoreRequest(items=items))
        listed = {scorer.name: scorer for scorer in (await stub.ListScorers(pb.ListScorersRequest())).scorers}
    assert [round(result.score, 1) for result in response.results] == [95.1, 100.0, 0.0]
    mine = listed["screened"]
    assert mine.kind == "screened"
    assert (mine.needs_logprobs, mine.needs_reference) == (True, True)


async def test_there_is_nothing_to_combine_or_to_fit(tmp_path: Path, mesh_file: MeshFileMaker) -> None:
    screened_settings = {"name": "screened", "kind": "screened", "scorers": ["sure", "costly"]}
    both = {"name": "both", "kind": "combined", "scorers": ["sure", "screened"], "calibration": "x"}
    problems = check_mesh_file(mesh_file(judge={"scorers": [*PARTS, screened_settings, both]})).problems
    assert "'screened' is screened: it has no raw scores to combine" in joined(problems)
    samples = tmp_path / "labelled.jsonl"
    samples.write_text("")
    file = mesh_file(judge={"scorers": [*PARTS, screened_settings]})
    with pytest.raises(SettingsError, match="nothing to fit; calibrate its parts"):
        await calibrate(file, "screened", samples, tmp_path / "out.json")
