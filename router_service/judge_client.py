"""Speaks JudgeService to whichever judge answers."""

import asyncio
import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from grpc import aio
from opentelemetry.trace import Tracer

from penstock.judge.v1 import judge_pb2 as pb
from penstock.judge.v1 import judge_pb2_grpc
from router_service.failures import RULES, Ejection, classify
from router_service.peers import Peers
from services import errors, telemetry
from services import proto_codec as common
from services.channels import ChannelPool
from services.domain.errors import Overloaded, PenstockError, Unavailable
from services.domain.requests import FinishReason, PositionLogprobs, Prompt

_log = logging.getLogger(__name__)

ROUNDS = 3  # over all judges
PAUSE_S = 0.2  # between two rounds


@dataclass(frozen=True, slots=True)
class Verdict:
    """score: 0 to 100."""

    score: float
    scorer: str


class JudgeClient:
    """Asks one judge after the other until one answers or the time is up."""

    def __init__(self, channels: ChannelPool, peers: Peers, tracer: Tracer, timeout_s: float) -> None:
        self._channels, self._peers, self._tracer, self._timeout_s = channels, peers, tracer, timeout_s
        self._needs: dict[tuple[str, str], bool] = {}  # (judge, scorer) -> wants logprobs

    async def needs_logprobs(self, scorer: str) -> bool:
        """Whether a scorer wants the answer's token logprobs; False while no judge can be asked."""
        for judge in self._peers.judges():
            key = (judge.instance_id, scorer)
            if key not in self._needs:
                stub = judge_pb2_grpc.JudgeServiceStub(self._channels.get(judge.address))
                try:
                    listed = await stub.ListScorers(pb.ListScorersRequest(), timeout=1.0)
                except aio.AioRpcError:
                    self._peers.suspect(judge.instance_id)
                    continue
                wanted = scorer or listed.default_scorer
                self._needs[key] = any(s.needs_logprobs for s in listed.scorers if s.name == wanted)
            return self._needs[key]
        return False

    async def score(
        self,
        scorer: str,
        prompt: Prompt,
        answer: str,
        tier: str,
        finish_reason: FinishReason,
        logprobs: Seq[PositionLogprobs],
        deadline_s: float,
    ) -> Verdict | None:
        """The verdict, or None if no judge gives one in time or this answer cannot be judged."""
        loop = asyncio.get_running_loop()
        until = min(deadline_s, loop.time() + self._timeout_s)
        request = _request(scorer, prompt, answer, tier, finish_reason, logprobs)
        for turn in range(ROUNDS):
            if turn:
                await self._peers.change(PAUSE_S)
            for judge in self._peers.judges():
                left_s = until - loop.time()
                if left_s <= 0:
                    return None
                try:
                    with self._peers.sending(judge.instance_id):
                        return await self._ask(judge.address, request, left_s, tier)
                except (Unavailable, Overloaded) as error:
                    _log.warning("judge %s: %s", judge.instance_id, error)
                    if RULES[classify(error)].ejection is not Ejection.NEVER:
                        self._peers.suspect(judge.instance_id)
                except PenstockError as error:
                    _log.warning("an answer of %s cannot be judged: %s", tier, error)
                    return None
        return None

    async def _ask(self, address: str, request: pb.ScoreRequest, timeout_s: float, tier: str) -> Verdict:
        stub = judge_pb2_grpc.JudgeServiceStub(self._channels.get(address))
        name = "penstock.judge.v1.JudgeService/Score"
        with telemetry.client_span(self._tracer, name, **{"penstock.tier": tier}) as span:
            try:
                answer = await stub.Score(request, timeout=timeout_s, metadata=telemetry.inject())
            except aio.AioRpcError as error:
                raise errors.from_rpc(error) from error
            span.set_attribute("penstock.score", answer.results[0].score)
            return Verdict(answer.results[0].score, answer.scorer)


def _request(
    scorer: str,
    prompt: Prompt,
    answer: str,
    tier: str,
    finish_reason: FinishReason,
    logprobs: Seq[PositionLogprobs],
) -> pb.ScoreRequest:
    item = pb.ScoreItem(
        prompt=common.prompt_to_proto(prompt),
        answer=answer,
        tier=tier,
        finish_reason=common.finish_reason_to_proto(finish_reason),
    )
    if logprobs:
        values = [position.chosen.logprob for position in logprobs]
        item.logprobs.CopyFrom(
            pb.LogprobSummary(token_count=len(values), mean_logprob=sum(values) / len(values), min_logprob=min(values))
        )
    return pb.ScoreRequest(scorer=scorer, items=[item])
