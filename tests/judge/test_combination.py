"""Scorers of scorers: a logistic combination (what it learns, how honestly it is measured, its file), and one that is asked
only where a cheap one is not sure."""

import json
import random
import re
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Judged
from penstock.judge_service.calibrate import calibrate
from penstock.judge_service.calibration import metrics
from penstock.judge_service.calibration.fitted import CalibrationError
from penstock.judge_service.calibration.isotonic import Calibration, fit
from penstock.judge_service.compose import read_options
from penstock.judge_service.scorers.combined.combination import ALL_TIERS, Combination, fit_combination
from penstock.judge_service.scorers.confidence import ConfidenceScorer
from penstock.judge_service.scorers.exact import ExactScorer
from penstock.judge_service.scorers.screened import ScreenedScorer
from penstock.judge_service.scoring.backlog import Backlog
from penstock.judge_service.scoring.extension import ScorerSite
from penstock.judge_service.scoring.interface import RawScore
from penstock.judge_service.scoring.registry import NamedScorer, RegisteredScorer, ScorerRegistry
from penstock.mapper import to_message
from penstock.proto.common.v1 import common_pb2
from penstock.proto.judge.v1 import judge_pb2 as pb
from penstock.proto.judge.v1 import judge_pb2_grpc
from penstock.services.domain.auc import auc
from penstock.services.domain.errors import InvalidRequest, Overloaded
from penstock.services.field_problems import SettingsError, joined
from penstock.services.mesh_check import check_mesh_file
from penstock.services.mesh_file import load_mesh_file
from penstock.services.settings import ServiceSettings
from penstock.types.judging import JudgedAnswer, LogprobSummary, ScoreRequest, ScorerInfo
from penstock.types.prompts import TextPrompt
from tests.conftest import MeshFileMaker
from tests.support.mesh import running_mesh, served_judge
from tests.support.services import RedisProcess

SHORT_MODEL = {"mean": [0], "scale": [1], "weights": [1], "intercept": 0, "samples": 1, "auc": 1, "brier": 0}
"""Of one scorer."""


def drawn(count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Two raw scores per answer, and labels of known probability."""
    rng = np.random.default_rng(seed)
    raws = rng.normal([5, -1], [3, 0.1], (count, 2))
    logits = 1.5 * (raws[:, 0] - 5) / 3 - 1.0 * (raws[:, 1] + 1) / 0.1 + 0.3
    return raws, rng.random(count) < 1 / (1 + np.exp(-logits))


def fitted(raws: np.ndarray, good: np.ndarray, tiers: list[str] | None = None) -> Combination:
    rows = len(good)
    return fit_combination(["a", "b"], raws.tolist(), good.tolist(), tiers or [""] * rows, range(rows))


def test_the_weights_of_known_data_are_found() -> None:
    model = fitted(*drawn(20_000)).models[ALL_TIERS]
    assert model.weights == pytest.approx((1.5, -1.0), abs=0.1)
    assert model.intercept == pytest.approx(0.3, abs=0.1)


def test_measures_are_of_answers_that_were_not_fitted_to() -> None:
    """Scores that are noise have AUC one half and a Brier score no better than a constant, however few samples."""
    rng = np.random.default_rng(2)
    aucs, briers = [], []
    for _ in range(40):
        model = fitted(rng.normal(size=(30, 2)), rng.permutation(np.arange(30) % 2 == 0)).models[ALL_TIERS]
        aucs.append(model.auc)
        briers.append(model.brier)
    assert float(np.mean(aucs)) < 0.55
    assert float(np.mean(briers)) > 0.25
    raw = rng.normal(size=60).tolist()
    noise = fit(raw, (rng.permutation(60) % 2 == 0).tolist(), [50.0] * 60)
    assert noise.brier > noise.brier_before == 0.25


def test_answers_to_one_prompt_are_never_on_both_sides() -> None:
    """A scorer that only recognises prompts is worth nothing for new ones."""
    rng = np.random.default_rng(3)
    prompts = np.repeat(np.arange(40), 5)
    labels = (rng.random(40) < 0.5)[prompts]
    raw = prompts.astype(float)  # tells prompts apart, and so their labels
    together = fit(raw.tolist(), labels.tolist(), [50.0] * 200, prompts.tolist())
    apart = fit(raw.tolist(), labels.tolist(), [50.0] * 200)
    assert together.brier > apart.brier
    for number in range(metrics.FOLDS):
        fold = metrics.folds(prompts.tolist()) == number
        assert not set(prompts[fold]) & set(prompts[~fold])


def test_each_tier_has_its_own_model_if_there_are_enough_answers() -> None:
    """A scorer may mean the opposite for another tier; a tier with few answers has the model of all."""
    raws, good = drawn(400)
    tiers = ["small"] * 200 + ["medium"] * 190 + ["large"] * 10
    good[200:390] = ~good[200:390]
    combination = fitted(raws, good, tiers)
    assert set(combination.models) == {ALL_TIERS, "small", "medium"}
    best, worst = (11.0, -1.2), (-1.0, -0.8)
    assert combination.logit("small", best) > 0 > combination.logit("medium", best)
    assert combination.logit("medium", worst) > 0
    assert combination.logit("large", best) == combination.logit("unknown", best)


def test_separable_answers_have_finite_weights() -> None:
    raws = np.array([[float(i), 7.0] for i in range(40)])  # and a scorer that says the same of all
    model = fitted(raws, np.arange(40) > 19).models[ALL_TIERS]
    assert all(abs(weight) < 10 for weight in model.weights)
    assert model.logit([1e30, 7.0]) == 80.0


def test_too_few_answers_are_refused() -> None:
    raws, _ = drawn(40)
    for labels in ([True] * 40, [True, False] * 5):
        with pytest.raises(CalibrationError, match="at least 20"):
            fitted(raws[: len(labels)], np.array(labels))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30))
def test_auc_is_the_share_of_pairs_in_the_right_order(samples: list[tuple[int, bool]]) -> None:
    pairs = [(x > y) + 0.5 * (x == y) for x, good in samples if good for y, other in samples if not other]
    expected = sum(pairs) / len(pairs) if pairs else 0.5
    assert auc([x for x, _ in samples], [g for _, g in samples]) == pytest.approx(expected)


async def test_a_combination_is_fitted_by_the_command_and_served(tmp_path: Path, mesh_file: MeshFileMaker) -> None:
    """From labelled answers to the scores of the judge; answers that the guards refuse are not fitted to."""
    rng = random.Random(1)
    rows = []
    for i in range(300):
        least = -rng.random() * 4
        good = rng.random() < 1 + least / 4
        answer = "4" if good or rng.random() < 0.3 else "5"
        row = {"prompt": f"p{i}", "answer": answer, "reference": "4", "mean_logprob": least / 2, "min_logprob": least}
        rows.append(row | {"good": good, "tier": "small"})
    rows.append({"prompt": "p", "answer": "", "good": False})
    rows.append({"prompt": "p", "answer": "4", "good": True, "finish_reason": "length"})
    samples, out = tmp_path / "labelled.jsonl", tmp_path / "combined.json"
    samples.write_text("\n".join(map(json.dumps, rows)))
    scorers = [
        {"name": "least", "kind": "confidence", "statistic": "min"},
        {"name": "exact", "kind": "exact", "compare": "text"},
        {"name": "both", "kind": "combined", "scorers": ["least", "exact"], "calibration": str(out)},
    ]
    file = mesh_file(judge={"scorers": scorers})
    summary = await calibrate(file, "both", samples, out)
    assert "2 more are refused by the guards" in summary
    assert "small: 300 samples" in summary
    mesh = load_mesh_file(file)
    settings_ = ServiceSettings.load(redis_url="redis://unused")
    async with AsyncExitStack() as stack:
        parts = dict[str, NamedScorer]()
        for each in mesh.judge.scorers:
            site = ScorerSite(mesh, each, settings_, parts)
            parts[each.name] = await read_options(mesh, each).registered(site, stack)
    both = parts["both"]
    assert isinstance(both, RegisteredScorer)
    scorer = both.scorer
    assert (both.info.needs_logprobs, both.info.needs_reference) == (True, True)
    sure, unsure = (LogprobSummary(1, least, least) for least in (-0.1, -3.5))
    results = await scorer.score(
        [JudgedAnswer(TextPrompt("p"), a, logprobs=s, reference="4") for a, s in (("4", sure), ("5", unsure))]
    )
    assert results[0].score > 60 > 40 > results[1].score
    summary = await calibrate(file, "least", samples, tmp_path / "least.json")
    assert "300 samples" in summary
    assert "AUC" in summary
    made = Calibration.read(tmp_path / "least.json")
    assert made.apply(-0.1) > made.apply(-3.5)
    assert made.brier <= made.brier_before


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scorers": ["exact", "least"]}, "was fitted to exact, least, not to least, exact"),
        ({"models": {}}, "a model of all tiers"),
        ({"models": {"": {"mean": [0]}}}, "scale"),
        ({"models": {"": SHORT_MODEL}}, "needs 2 means"),
        ("{", "Invalid JSON"),
    ],
)
def test_a_combination_file_is_checked(
    change: dict[str, object] | str, problem: str, tmp_path: Path, mesh_file: MeshFileMaker
) -> None:
    out = tmp_path / "combined.json"
    raws, good = drawn(40)
    fit_combination(["least", "exact"], raws.tolist(), good.tolist(), [""] * 40, range(40)).write(out)
    assert Combination.read(out).scorers == ("least", "exact")
    out.write_text(change if isinstance(change, str) else json.dumps(json.loads(out.read_text()) | change))
    scorers = [
        {"name": "least", "kind": "confidence"},
        {"name": "exact", "kind": "exact"},
        {"name": "both", "kind": "combined", "scorers": ["least", "exact"], "calibration": str(out)},
    ]
    mesh = load_mesh_file(mesh_file(judge={"scorers": scorers}))
    parts = {name: RegisteredScorer(ScorerInfo(name), ConfidenceScorer(), None) for name in ("least", "exact")}
    site = ScorerSite(mesh, mesh.judge.scorers[2], ServiceSettings.load(redis_url="redis://unused"), parts)
    with pytest.raises(SettingsError, match=problem):
        read_options(mesh, site.scorer).build(site)


@pytest.mark.parametrize(
    ("scorer", "problem"),
    [
        ({"kind": "combined", "scorers": ["a"], "calibration": "x"}, "at least two"),
        ({"kind": "combined", "scorers": ["a", "later"], "calibration": "x"}, "no scorer 'later' above this one"),
        ({"kind": "combined", "scorers": ["a", "b"]}, "the file with the fitted weights"),
        ({"kind": "screened", "scorers": ["a"]}, r"scorers\[1\]\.scorers: a screened scorer needs two"),
        ({"kind": "screened", "scorers": ["a", "later"]}, "no scorer 'later' above this one"),
        ({"kind": "screened", "scorers": ["a", "a"], "calibration": "x"}, "has none: its parts have"),
        ({"kind": "screened", "scorers": ["a", "a"], "margin": 51}, "margin"),
        ({"kind": "reward", "endpoint": "http://x"}, "endpoint and model"),
        ({"kind": "consistency", "timeout_s": 12}, r"timeout_s: 12 s, but router\.judge_timeout_s is 10 s"),
        ({"kind": "llm", "endpoint": "http://x", "model": "m", "extra_body": {"n": 2}}, r"extra_body\.n: is set by"),
        ({"kind": "llm", "tier": "huge"}, r"judge.scorers\[1\].tier: no tier 'huge'"),
        ({"kind": "llm"}, "either tier, or endpoint and model"),
        (
            {"kind": "llm", "tier": "large", "endpoint": "http://x/v1", "model": "m"},
            "either tier, or endpoint and model",
        ),
        ({"kind": "exact", "tolerance": 1.5}, "tolerance"),
        ({"kind": "confidence", "statistic": "max"}, "statistic"),
    ],
)
def test_bad_scorers_are_named(scorer: dict[str, object], problem: str, mesh_file: MeshFileMaker) -> None:
    scorers = [{"name": "a", "kind": "confidence"}, {"name": "b", **scorer}, {"name": "later", "kind": "confidence"}]
    assert re.search(problem, joined(check_mesh_file(mesh_file(judge={"scorers": scorers})).problems))


async def test_a_mesh_without_a_judge_section_judges_by_stated_weights(
    redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    """Better log-probabilities and examples that pass raise a score; client and operator are told what it is not."""
    async with running_mesh(mesh_file(judge={}), redis.url) as mesh:
        async with mesh.client() as client:
            events = [event async for event in client.stream("Hello")]
            (verdict,) = [event for event in events if isinstance(event, Judged)]
            assert (verdict.scorer, verdict.uncalibrated) == ("default", True)
            assert (await client.generate("Hello")).tiers[0].uncalibrated
            assert "'default' is not calibrated" in (await client.status()).warnings[0]
        judge = next(chassis for name, chassis in mesh.parts.items() if name.startswith("judge"))
        async with aio.insecure_channel(judge.address) as channel:
            request = ScoreRequest(
                tuple(
                    JudgedAnswer(TextPrompt("f(1) == 1"), answer, logprobs=LogprobSummary(4, mean, mean))
                    for answer in ("f = abs", "f = print")
                    for mean in (-0.02, -0.2)
                )
            )
            response = await judge_pb2_grpc.JudgeServiceStub(channel).Score(to_message(request, pb.ScoreRequest))
    sure, unsure, failing_sure, failing = (result.score for result in response.results)
    assert sure > unsure >= failing
    assert sure >= failing_sure > failing


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
    first = RegisteredScorer(ScorerInfo("sure", needs_logprobs=True), ConfidenceScorer(), None)
    second = RegisteredScorer(ScorerInfo("costly"), costly, HALVED, backlog)
    return ScorerRegistry([first, second, ScreenedScorer(ScorerInfo("screened"), first, second, margin)], "screened")


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
