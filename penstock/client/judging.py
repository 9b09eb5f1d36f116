"""A client of the judge, for measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from penstock.client import connection, errors
from penstock.client.chat import prompt_value
from penstock.client.types import Options, Prompt, Reply
from penstock.mapper import from_message, to_message
from penstock.proto.judge.v1 import judge_pb2 as pb
from penstock.proto.judge.v1 import judge_pb2_grpc
from penstock.types.judging import JudgedAnswer, LogprobSummary, ScoreRequest, ScoreResult, ScorerInfo


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and a tier's reply. reference: the expected answer, if known."""

    prompt: Prompt
    reply: Reply
    reference: str | None = None


class AsyncJudge:
    """A client of one judge, at `host:port`."""

    def __init__(self, target: str, *, tls: connection.Tls | None = None) -> None:
        self._channel = connection.aio_channel(target, connection.administrative(tls, "judge"), connection.OPTIONS)
        self._stub: judge_pb2_grpc.JudgeServiceAsyncStub = judge_pb2_grpc.JudgeServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def scorers(self) -> tuple[list[ScorerInfo], str]:
        """The scorers of the judge, and the name of its default one.

        Raises:
            PenstockError: The call failed.
        """
        with errors.raised_from_rpc():
            listed = await self._stub.ListScorers(pb.ListScorersRequest(), timeout=connection.DEFAULT_TIMEOUT_S)
        return [from_message(scorer, ScorerInfo) for scorer in listed.scorers], listed.default_scorer

    async def score(self, answers: Sequence[Answered], scorer: str = "") -> list[float]:
        """The scores of answers, from 0 to 100. scorer: empty for the judge's default.

        Raises:
            PenstockError: The call failed.
        """
        return [verdict.score for verdict in await self.verdicts(answers, scorer)]

    async def verdicts(self, answers: Sequence[Answered], scorer: str = "") -> list[ScoreResult]:
        """The scores of answers with the reasons of those that were refused. scorer: empty for the judge's default.

        Raises:
            PenstockError: The call failed.
        """
        items = tuple([_item(answered) for answered in answers])
        request = to_message(ScoreRequest(items, scorer), pb.ScoreRequest)
        with errors.raised_from_rpc():
            response = await self._stub.Score(request, timeout=connection.DEFAULT_TIMEOUT_S)
        return [from_message(result, ScoreResult) for result in response.results]


def _item(answered: Answered) -> JudgedAnswer:
    reply, prompt = answered.reply, prompt_value(answered.prompt, Options())
    logprobs = [position.chosen.logprob for position in reply.logprobs]
    summary = LogprobSummary.of(logprobs) if logprobs else None
    return JudgedAnswer(prompt, reply.text, reply.tier, reply.finish_reason, summary, answered.reference)
