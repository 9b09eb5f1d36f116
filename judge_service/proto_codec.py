"""Converts between the judge's domain types and protobuf messages."""

from judge_service.scorer_registry import NamedScorer, ScoreResult
from judge_service.scorers import JudgedAnswer, LogprobSummary, ScorerKind
from penstock.proto.judge.v1 import judge_pb2 as pb
from services import proto_codec as common
from services.domain.errors import InvalidRequest, invalid
from services.domain.requests import prompt_problems

MAX_ITEMS = 256
MAX_ANSWER_CHARS = 1_000_000

_KINDS = {
    ScorerKind.JUDGE_MODEL: pb.SCORER_KIND_JUDGE_MODEL,
    ScorerKind.LLM: pb.SCORER_KIND_LLM,
    ScorerKind.CONFIDENCE: pb.SCORER_KIND_CONFIDENCE,
    ScorerKind.EXACT: pb.SCORER_KIND_EXACT,
    ScorerKind.REWARD: pb.SCORER_KIND_REWARD,
    ScorerKind.JSON_SCHEMA: pb.SCORER_KIND_JSON_SCHEMA,
    ScorerKind.CODE: pb.SCORER_KIND_CODE,
    ScorerKind.CONSISTENCY: pb.SCORER_KIND_CONSISTENCY,
    ScorerKind.COMBINED: pb.SCORER_KIND_COMBINED,
    ScorerKind.SCREENED: pb.SCORER_KIND_SCREENED,
}


def answers_from_proto(request: pb.ScoreRequest) -> list[JudgedAnswer]:
    """The answers of a request.

    Raises:
        InvalidRequest: A field is invalid; the error names it.
    """
    if not 1 <= len(request.items) <= MAX_ITEMS:
        raise invalid("items", f"1 to {MAX_ITEMS} items, not {len(request.items)}")
    answers = []
    for i, item in enumerate(request.items):
        prompt = common.prompt_from_proto(item.prompt, f"items[{i}].prompt")
        problems = [*prompt_problems(prompt, f"items[{i}].prompt")]
        structured = None
        if item.HasField("structured_output"):
            structured = common.structured_output_from_proto(item.structured_output, f"items[{i}].structured_output")
            problems += structured.problems(f"items[{i}].structured_output") if structured is not None else ()
        if problems:
            raise InvalidRequest(*problems)
        if len(item.answer) > MAX_ANSWER_CHARS:
            raise invalid(f"items[{i}].answer", f"longer than {MAX_ANSWER_CHARS} characters")
        if item.unfinished and not item.answer.strip():
            raise invalid(f"items[{i}].answer", "must not be blank where it is unfinished")
        summary = None
        if item.HasField("logprobs"):
            logprobs = item.logprobs
            summary = LogprobSummary(logprobs.token_count, logprobs.mean_logprob, logprobs.min_logprob)
        answers.append(
            JudgedAnswer(
                prompt=prompt,
                answer=item.answer,
                tier=item.tier,
                finish_reason=common.finish_reason_from_proto(item.finish_reason),
                logprobs=summary,
                reference=item.reference if item.HasField("reference") else None,
                tool_format=item.tool_format,
                structured_output=structured,
                unfinished=item.unfinished,
            )
        )
    return answers


def score_result_to_proto(result: ScoreResult) -> pb.ScoreResult:
    return pb.ScoreResult(score=result.score, raw=result.raw, reason=result.reason)


def scorer_to_proto(scorer: NamedScorer) -> pb.Scorer:
    return pb.Scorer(
        name=scorer.name,
        kind=_KINDS[scorer.kind],
        calibrated=scorer.calibrated,
        needs_logprobs=scorer.needs_logprobs,
        needs_reference=scorer.needs_reference,
        scores_unfinished=scorer.scores_unfinished,
    )
