"""A client of the judge, for measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from penstock.client import chat, connection, errors
from penstock.client.types import Options, PositionLogprobs, Prompt, Reply
from penstock.proto.common.v1 import common_pb2
from penstock.proto.judge.v1 import judge_pb2 as pb
from penstock.proto.judge.v1 import judge_pb2_grpc


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and a tier's reply. reference: the expected answer, if known."""

    prompt: Prompt
    reply: Reply
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """score: from 0 to 100. reason: why the judge gave 0 without its scorer, such as `truncated_answer`; otherwise empty."""

    score: float
    reason: str = ""


class AsyncJudge:
    """A client of one judge.

    target: `host:port`. timeout_s: of one call.
    """

    def __init__(
        self, target: str, *, timeout_s: float = connection.DEFAULT_TIMEOUT_S, tls: connection.Tls | None = None
    ) -> None:
        self._channel = connection.aio_channel(target, connection.administrative(tls, "judge"), connection.OPTIONS)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def score(self, answers: Sequence[Answered], scorer: str = "") -> list[float]:
        """The scores of answers, from 0 to 100. scorer: empty for the judge's default.

        Raises:
            PenstockError: The call failed.
        """
        return [verdict.score for verdict in await self.verdicts(answers, scorer)]

    async def verdicts(self, answers: Sequence[Answered], scorer: str = "") -> list[Verdict]:
        """The scores of answers with the reasons of those that were refused. scorer: empty for the judge's default.

        Raises:
            PenstockError: The call failed.
        """
        return await self._verdicts(scorer, [_item(answered) for answered in answers])

    async def score_beginnings(self, answered: Answered, tokens: Sequence[int], scorer: str = "") -> list[float | None]:
        """The scores that a reply would have had when it had so many tokens and was not finished.

        None where it has no more tokens than that, or where their text is not the beginning of the reply's. The reply must
        have logprobs.

        Raises:
            PenstockError: The call failed, as it does with a scorer that does not score unfinished answers.
        """
        items = [_beginning(answered, count) for count in tokens]
        to_score = [item for item in items if item is not None]
        verdicts = iter(await self._verdicts(scorer, to_score) if to_score else ())
        return [None if item is None else next(verdicts).score for item in items]

    async def _verdicts(self, scorer: str, items: Sequence[pb.ScoreItem]) -> list[Verdict]:
        request = pb.ScoreRequest(scorer=scorer, items=items)
        with errors.raised_from_rpc():
            response = await judge_pb2_grpc.JudgeServiceStub(self._channel).Score(request, timeout=self._timeout_s)
        return [Verdict(result.score, result.reason) for result in response.results]


def _item(answered: Answered) -> pb.ScoreItem:
    reply = answered.reply
    item = pb.ScoreItem(
        prompt=chat.prompt_to_proto(answered.prompt, Options()),
        answer=reply.text,
        tier=reply.tier,
        finish_reason=common_pb2.FinishReason.Value(f"FINISH_REASON_{reply.finish_reason.value.upper()}"),
        reference=answered.reference,
    )
    if reply.logprobs:
        item.logprobs.CopyFrom(_summary(reply.logprobs))
    return item


def _beginning(answered: Answered, tokens: int) -> pb.ScoreItem | None:
    reply = answered.reply
    if len(reply.logprobs) <= tokens:
        return None
    positions = reply.logprobs[:tokens]
    text = b"".join(position.chosen.token_bytes for position in positions).decode("utf-8", "ignore")
    if not text.strip() or not reply.text.startswith(text):
        return None
    return pb.ScoreItem(
        prompt=chat.prompt_to_proto(answered.prompt, Options()),
        answer=text,
        tier=reply.tier,
        logprobs=_summary(positions),
        unfinished=True,
    )


def _summary(positions: Sequence[PositionLogprobs]) -> pb.LogprobSummary:
    values = [position.chosen.logprob for position in positions]
    return pb.LogprobSummary(token_count=len(values), mean_logprob=sum(values) / len(values), min_logprob=min(values))
