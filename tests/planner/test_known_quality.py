"""Answers whose quality is known apart from their score: thresholds compare scores, targets are of the quality."""

from pathlib import Path

import numpy as np
import pytest

from penstock.planner_service.question.demand import demand_of, draw_demand, workload_digest
from penstock.planner_service.question.imputation import imputed
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.simulator import Workload
from penstock.question_files.errors import FileError
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.workload import RequestRecord, TierVisit
from tests.support.inputs import read_quality
from tests.support.judged_samples import judged_sample
from tests.support.plain_plans import plan_cascade
from tests.support.present import present
from tests.support.questions import question, site_and_demand, with_prompts


def test_the_quality_of_a_sample_and_of_requests_drawn_from_it_is_the_known_one() -> None:
    sample = judged_sample(1, known=True)
    known = present(sample.known_quality)
    assert (sample.best, sample.worst) == (known[:, 2].mean(), known[:, 0].mean())
    drawn = draw_demand(sample, np.arange(7.0), 3).requests
    assert drawn.known_quality is not None
    trace = Workload(np.arange(9.0), np.full(9, 8), np.full(9, 4))
    by_trace = demand_of(trace, sample, requests=7, seed=3, lengths="trace", rate=None).requests
    assert (by_trace.quality == drawn.quality).all()
    bare = JudgedSample(sample.tiers, sample.input_tokens, sample.output_tokens, sample.scores)
    assert workload_digest(draw_demand(bare, np.arange(7.0), 3)) != workload_digest(
        draw_demand(sample, np.arange(7.0), 3)
    )


def test_requests_that_were_observed_borrow_the_quality_of_their_donor() -> None:
    """A record has a score, but nobody knows what its answer is worth: that of stored prompts with such scores."""
    scores = np.array([[10.0, 50.0], [90.0, 50.0]] * 10)
    quality = np.array([[0.0, 100.0], [100.0, 100.0]] * 10)
    profile = JudgedSample(("a", "b"), np.full(20, 9), np.full((20, 2), 4), scores, known_quality=quality)
    records = [RequestRecord(0.0, 9, (TierVisit("a", 4, score),)) for score in (10.0, 90.0)]
    result = imputed(profile, records, 40, 1)
    assert (present(result.known_quality)[:, 0] == np.where(result.scores[:, 0] == 10, 0, 100)).all()


@pytest.mark.slow
def test_a_plan_reaches_the_known_quality_where_the_score_would_not() -> None:
    """A judge that flatters the small tier: by scores it answers all; by what the answers are worth it may not."""
    made = with_prompts(question(), judge_scores=[(95.0 if i % 2 else 60.0, 95.0, 95.0) for i in range(100)])
    site, demand = site_and_demand(made)
    flattered = plan_cascade(site, demand, min_quality=75, seed=1)
    worth = [(100.0 if i % 4 == 1 else 0.0, 90.0, 95.0) for i in range(100)]
    _, known = site_and_demand(with_prompts(made, qualities=worth))
    plan = plan_cascade(site, known, min_quality=75, seed=1)
    assert flattered.quality == 77.5
    assert route(known.judged, flattered.thresholds).quality < 75, "the case is one in which the score misleads"
    assert plan.quality >= 75
    assert plan.quality == pytest.approx(route(known.judged, plan.thresholds).quality)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [([5.0], "the cascade has 3 tiers, not 1"), ([5, 5, 500], "must be from 0 to 100"), ([], "must have them or none")],
)
def test_qualities_that_cannot_be_are_named(values: list[float], complaint: str) -> None:
    worth: list[tuple[float, ...]] = [(0.0, 50.0, 100.0)] * 100
    worth[4] = tuple(values)
    with pytest.raises(InvalidRequest) as caught:
        site_and_demand(with_prompts(question(), qualities=worth))
    (problem,) = caught.value.problems
    assert problem.field.startswith("quality.prompts[4].qualities")
    assert complaint in problem.problem


def test_a_quality_file_may_say_what_answers_are_worth(tmp_path: Path) -> None:
    head = "input_tokens,a_output_tokens,a_judge_score,a_quality,b_output_tokens,b_judge_score,b_quality\n"
    file = tmp_path / "judged.csv"
    file.write_text(head + "5,3,40,100,6,90,0\n7,3,80,0,6,95,100\n")
    sample = read_quality(file, ("a", "b"))
    assert sample.quality.tolist() == [[100, 0], [0, 100]]
    assert sample.scores.tolist() == [[40, 90], [80, 95]]
    assert route(sample, (50,)).quality == 0
    file.write_text(head.replace("\n", ",a_score_after_16\n") + "5,3,40,100,6,90,0,\n7,3,80,0,6,95,100,12.5\n")
    assert read_quality(file, ("a", "b")).scores.tolist() == sample.scores.tolist(), "columns of earlier versions"
    file.write_text(head + "5,3,40,101,6,90,0\n")
    with pytest.raises(FileError, match="line 2: a_quality must be from 0 to 100, not 101"):
        read_quality(file, ("a", "b"))
    for row, column in (("1e30,3,40,100,6,90,0", "input_tokens"), ("5,3,40,100,1e19,90,0", "b_output_tokens")):
        file.write_text(f"{head}{row}\n")
        with pytest.raises(
            FileError, match=f"judged.csv: line 2: {column} must be a whole number from 0 to 2,147,483,647"
        ):
            read_quality(file, ("a", "b"))
