"""Answers that score 0 whatever the scorer is."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.judge_service.calibration.isotonic import Calibration
from penstock.judge_service.scorers.confidence import ConfidenceScorer
from penstock.judge_service.scorers.exact import ExactScorer
from penstock.judge_service.scoring.guards import Guard, objection
from penstock.judge_service.scoring.interface import RawScore
from penstock.judge_service.scoring.registry import RegisteredScorer, ScorerRegistry
from penstock.judge_service.scoring.repetition import MIN_REPEATS, loop_characters
from penstock.proto.common.v1 import common_pb2
from penstock.proto.judge.v1 import judge_pb2 as pb
from penstock.services.domain.errors import InvalidRequest
from penstock.types.judging import JudgedAnswer, LogprobSummary, ScorerInfo
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import FinishReason
from penstock.types.structured import StructuredOutput
from penstock.types.tools import Tool, ToolChoice, ToolMode, ToolUse
from tests.conftest import MeshFileMaker
from tests.support.mesh import served_judge
from tests.support.services import RedisProcess

GENEROUS = Calibration((-9.0, 0.0), (60.0, 100.0), samples=20, brier=0.0, brier_before=0.0)


class CountingScorer(ConfidenceScorer):
    """A confidence scorer that keeps what it was asked about."""

    def __init__(self) -> None:
        super().__init__()
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
        [
            RegisteredScorer(ScorerInfo("sure"), scorer, GENEROUS),
            RegisteredScorer(ScorerInfo("exact"), ExactScorer("text"), None),
        ],
        "sure",
    )
    for name in ("sure", "exact"):
        _, (result,) = await registry.judge(name, [judged(answer)])
        assert (result.score, result.raw, result.reason) == (0.0, 0.0, "empty_answer")
    assert scorer.asked == []


async def test_answers_beside_an_empty_one_are_scored_in_their_places() -> None:
    scorer = CountingScorer()
    registry = ScorerRegistry([RegisteredScorer(ScorerInfo("sure"), scorer, None)], "sure")
    _, results = await registry.judge("", [judged(""), judged("a", mean=-0.5), judged(" "), judged("b", mean=-0.1)])
    assert scorer.asked == ["a", "b"]
    assert [result.reason for result in results] == ["empty_answer", "", "empty_answer", ""]
    assert [result.raw for result in results] == [0.0, -0.5, 0.0, -0.1]


async def test_an_error_names_the_item_as_the_request_counts_it() -> None:
    registry = ScorerRegistry([RegisteredScorer(ScorerInfo("sure"), ConfidenceScorer(), None)], "sure")
    with pytest.raises(InvalidRequest, match=r"items\[3\]\.logprobs"):
        await registry.judge("", [judged(""), judged("a"), judged(""), judged("b", mean=None)])


SENTENCES = (
    "The river rises in the hills and turns south at the old bridge. Boats pass below it from spring to autumn. "
    "In winter the ice is thick enough to walk on, and the ferry is moored at the mill until the thaw."
)


@pytest.mark.parametrize(
    "text",
    [
        "ha" * 60,
        "I see. " * 40,
        SENTENCES + " and then it" + " says that it" * 60,
        "\n".join(["- the same line of a list"] * 30) + "\n- the sa",
        "x" * 200_000,
    ],
)
def test_answers_of_a_model_that_loops_score_nothing(text: str) -> None:
    assert objection(judged(text)) == "repeated_answer"
    assert objection(judged(text), frozenset({Guard.TRUNCATED})) is None


@pytest.mark.parametrize(
    "text",
    [
        SENTENCES,
        "7 7 7 7 7 7 7",
        "0" * 80,
        SENTENCES + "\n" + "-" * 100 + "\n" + SENTENCES,
        "\n".join(f"| {i} | {i * i} | {i**3} |" for i in range(60)),
        SENTENCES * 2,
        "\n".join(f"x_{i} = f(x_{i - 1})" for i in range(1, 40)),
    ],
)
def test_answers_that_only_contain_repetition_are_scored(text: str) -> None:
    """Short ones, rules and tables, and texts that say something twice."""
    assert objection(judged(text)) is None


@given(st.text("ab", min_size=1, max_size=40), st.integers(1, 30), st.text("abc", max_size=40))
def test_the_loop_at_the_end_is_found_in_full(piece: str, repeats: int, before: str) -> None:
    """Compared with trying every period of every end."""
    text = before + piece * repeats
    expected = 0
    for length in range(1, len(text) + 1):
        tail = text[-length:]
        if any(tail[period:] == tail[:-period] for period in range(1, length // MIN_REPEATS + 1)):
            expected = length
    assert loop_characters(text) == expected


@pytest.mark.parametrize("reason", FinishReason)
def test_an_answer_that_was_cut_off_scores_nothing(reason: FinishReason) -> None:
    """The small model would have gone on; that its beginning is likely says nothing about the rest."""
    cut = replace(judged("The answer is 4 because"), finish_reason=reason)
    assert objection(cut) == ("truncated_answer" if reason is FinishReason.LENGTH else None)
    assert objection(cut, frozenset({Guard.REPEATED})) is None


def test_an_answer_of_a_wrong_form_is_named_as_that() -> None:
    """JSON that was asked for and not given, cut off or not."""
    form = StructuredOutput(json_schema='{"type": "object", "required": ["a"]}')
    for text in ("Sure! Here is your JSON.", '{"a": 1', '{"b": 1}', "[" * 100_000):
        item = replace(judged(text), structured_output=form)
        assert objection(item, frozenset()) == "invalid_structure"
        assert objection(replace(item, finish_reason=FinishReason.LENGTH)) == "invalid_structure"
    assert objection(replace(judged('{"a": 1}'), structured_output=form)) is None


async def test_guards_of_the_mesh_file_are_those_of_the_judge(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """By default cut and repeated answers score 0 with a reason; each guard can be turned off, empty answers cannot."""
    prompt = common_pb2.Prompt(text="p")
    summary = pb.LogprobSummary(tokens=1, mean=-0.1, least=-0.2)
    length = common_pb2.FINISH_REASON_LENGTH
    items = [
        pb.JudgedAnswer(prompt=prompt, answer="four", logprobs=summary, finish_reason=length),
        pb.JudgedAnswer(prompt=prompt, answer="ha" * 100, logprobs=summary),
        pb.JudgedAnswer(prompt=prompt, answer=" ", logprobs=summary),
        pb.JudgedAnswer(prompt=prompt, answer="four", logprobs=summary),
    ]
    reasons = {}
    scorers = [{"name": "confidence", "kind": "confidence"}]
    for guards in (None, ["repeated"], ["truncated"], []):
        judge: dict[str, object] = {"scorers": scorers} | ({} if guards is None else {"guards": guards})
        async with served_judge(mesh_file(judge=judge), redis.url) as (stub, _):
            response = await stub.Score(pb.ScoreRequest(items=items))
        key = "default" if guards is None else "".join(guards)
        reasons[key] = [result.reason for result in response.results]
        assert all((result.score == 0) == bool(result.reason) for result in response.results)
    assert reasons == {
        "default": ["truncated_answer", "repeated_answer", "empty_answer", ""],
        "repeated": ["", "repeated_answer", "empty_answer", ""],
        "truncated": ["truncated_answer", "", "empty_answer", ""],
        "": ["", "", "empty_answer", ""],
    }


def test_calls_are_checked_against_the_tools_of_the_prompt() -> None:
    prompt = ChatPrompt((ChatMessage("user", "hi"),), ToolUse((Tool("f"),), ToolChoice(ToolMode.REQUIRED)))
    assert objection(replace(judged("no call"), prompt=prompt, tool_format="hermes")) == "invalid_tool_call"
    assert objection(replace(judged("no call"), tool_format="hermes")) is None
