"""A client of the judge, for measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from penstock.client import chat, connection, errors
from penstock.client.types import Options, Prompt, Reply
from penstock.proto.common.v1 import common_pb2
from penstock.proto.judge.v1 import judge_pb2 as pb
from penstock.proto.judge.v1 import judge_pb2_grpc


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and a tier's reply. reference: the expected answer, if known."""

    prompt: Prompt
    reply: Reply
    reference: str | None = None


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
        request = pb.ScoreRequest(scorer=scorer, items=[_item(answered) for answered in answers])
        with errors.raised_from_rpc():
            response = await judge_pb2_grpc.JudgeServiceStub(self._channel).Score(request, timeout=self._timeout_s)
        return [result.score for result in response.results]


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
        values = [position.chosen.logprob for position in reply.logprobs]
        item.logprobs.CopyFrom(
            pb.LogprobSummary(token_count=len(values), mean_logprob=sum(values) / len(values), min_logprob=min(values))
        )
    return item
