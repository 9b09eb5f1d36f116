"""Calls of JudgeService, which do not make an overload of the judges worse.

An answer that cannot be judged escalates to the largest tier, which may be the judge. So a judgement is not retried on a
judge that is full, a judge that does not answer in time gets no calls for a while, and concurrent judgements are limited.
"""

import asyncio
import logging
from dataclasses import dataclass

from grpc import aio
from opentelemetry.metrics import Meter
from opentelemetry.trace import Tracer

from penstock.mapper import from_message, to_message
from penstock.proto.judge.v1 import judge_pb2 as pb
from penstock.proto.judge.v1 import judge_pb2_grpc
from penstock.router_service.clients.circuit_breaker import CircuitBreaker
from penstock.router_service.domain.failures import Ejection, classify
from penstock.router_service.routing.instance_pool import InstancePool
from penstock.services import errors, telemetry
from penstock.services.channels import ChannelPool
from penstock.services.domain.errors import DeadlineExceeded, Overloaded, PenstockError, Unavailable
from penstock.services.domain.instances import Role
from penstock.services.mesh_schema.router import MeshRouter
from penstock.types.judging import JudgedAnswer, ScoreRequest, ScorerInfo

_log = logging.getLogger(__name__)

ROUNDS = 3  # over all judges, if they cannot be reached: a restarted one is ready within a second
PAUSE_S = 0.2  # between two rounds
CHARS_PER_TOKEN = 3.0  # of a text that is read by a tier's model, at least
READING_SLACK = 3.0  # of the time for reading: the tier has other work, too
ENOUGH_SHARE = 0.4
"""Of the time that a judgement may take: at least this much is left after waiting half of it for a place."""


@dataclass(frozen=True, slots=True)
class JudgedScore:
    """score: 0 to 100. reason: why the judge gave 0 without its scorer; otherwise empty. uncalibrated: scores are not
    shares of right answers."""

    score: float
    scorer: str
    reason: str = ""
    uncalibrated: bool = False


class JudgeClient:
    """Calls one judge after another until one answers, all refuse, or the time is up."""

    def __init__(
        self, channels: ChannelPool, pool: InstancePool, tracer: Tracer, meter: Meter, limits: MeshRouter
    ) -> None:
        self._channels, self._pool, self._tracer, self._limits = channels, pool, tracer, limits
        self._scorers: dict[tuple[str, str], ScorerInfo] = {}  # by judge and scorer
        self._places = asyncio.Semaphore(limits.judge_concurrency)
        self._breakers: dict[str, CircuitBreaker] = {}  # by judge
        self._failures = meter.create_counter(
            "penstock.router.judge_failures",
            unit="{judgement}",
            description="Answers without a score, by reason: timeout, refused, unavailable, open (no judge is called for "
            "a while), invalid (this answer cannot be judged).",
        )

    async def needs_logprobs(self, scorer: str) -> bool:
        """Whether a scorer needs the answer's token logprobs.

        True while no judge can be reached: one may be there when the answer is complete, and without them it gives no score.
        """
        listed = await self.listed(scorer)
        return listed is None or listed.needs_logprobs

    async def listed(self, scorer: str) -> ScorerInfo | None:
        """What the first judge that can be reached says of a scorer; None without one. A scorer that it does not have needs
        nothing."""
        for judge in self._pool.judges():
            key = (judge.instance_id, scorer)
            if key not in self._scorers:
                stub = judge_pb2_grpc.JudgeServiceStub(self._channels.get(judge.address, Role.JUDGE))
                try:
                    listed = await stub.ListScorers(pb.ListScorersRequest(), timeout=1.0)
                except aio.AioRpcError:
                    self._pool.eject(judge.instance_id)
                    continue
                name = scorer or listed.default_scorer
                match = next((s for s in listed.scorers if s.name == name), None)
                if match is None:
                    return ScorerInfo(name)
                self._scorers[key] = from_message(match, ScorerInfo)
            return self._scorers[key]
        return None

    async def score(self, scorer: str, answer: JudgedAnswer, deadline_s: float) -> JudgedScore | None:
        """The verdict, or None if no judge gives one in time or this answer cannot be judged."""
        limit_s = self._limits.judge_timeout_s + self._reading_s(scorer, answer)
        now = asyncio.get_running_loop().time()
        until = min(deadline_s, now + limit_s)
        request, tier = to_message(ScoreRequest((answer,), scorer), pb.ScoreRequest), answer.tier
        try:
            async with asyncio.timeout_at(until):
                # Half of the time may pass until there is a place: a later call could hardly be answered in time, and its
                # failure would not be the judge's.
                async with asyncio.timeout_at(now + (until - now) / 2):
                    await self._places.acquire()
                try:
                    return await self._ask_in_turn(request, tier, until)
                finally:
                    self._places.release()
        except (TimeoutError, PenstockError) as error:
            reason = _reason(error)
            level = logging.DEBUG if isinstance(error, NoJudgeAsked) else logging.WARNING
            _log.log(level, "an answer of %s has no score (%s): %s", tier, reason, error)
            self._failures.add(1, {"penstock.tier": tier, "penstock.reason": reason})
            return None

    def _reading_s(self, scorer: str, answer: JudgedAnswer) -> float:
        """The time in which a scorer reads prompt and answer with a tier's model, at its measured speed; 0 for others."""
        listed = next((info for (_, name), info in self._scorers.items() if name == scorer), None)
        tokens = (answer.prompt.characters + len(answer.answer)) / CHARS_PER_TOKEN
        limits_s = [0.0]
        for tier in listed.tiers if listed is not None else ():
            loads = [worker.load for worker in self._pool.view.workers(tier) if worker.load is not None]
            rates = [load.prompt_tokens_per_s for load in loads if load.prompt_tokens_per_s]
            limits_s += [READING_SLACK * tokens / max(rates)] if rates else []
        return max(limits_s)

    async def _ask_in_turn(self, request: pb.ScoreRequest, tier: str, until: float) -> JudgedScore:
        """The verdict of the first judge that gives one.

        Raises:
            NoJudgeAsked: No judge may be called now.
            PenstockError: The error of the last judge.
        """
        last: PenstockError
        for turn in range(ROUNDS):
            if turn:
                await self._pool.change(PAUSE_S)
            last = Unavailable("there is no judge")
            for judge in self._pool.judges():
                breaker = self._breaker(judge.instance_id)
                if not breaker.allows(asyncio.get_running_loop().time()):
                    last = last if isinstance(last, Overloaded) else NoJudgeAsked("no judge may be called for a while")
                    continue
                try:
                    with self._pool.sending(judge.instance_id):
                        return await self._ask_watched(judge.address, request, tier, until, breaker)
                except Overloaded as error:
                    last = error
                except Unavailable as error:
                    if classify(error).rule.ejection is not Ejection.NEVER:
                        self._pool.eject(judge.instance_id)
                    last = error
            if isinstance(last, Overloaded | NoJudgeAsked):
                break  # another call would only add to its load
        raise last

    async def _ask_watched(
        self, address: str, request: pb.ScoreRequest, tier: str, until: float, breaker: CircuitBreaker
    ) -> JudgedScore:
        """Call one judge, and record the result in its circuit breaker.

        A call that had little time does not count as a failure of the judge: see ENOUGH_SHARE.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        enough_s = self._limits.judge_timeout_s * ENOUGH_SHARE
        breaker.passed()
        try:
            verdict = await self._ask(address, request, until - asked_at, tier)
        except Overloaded as error:
            if until - asked_at >= enough_s:
                breaker.refused(loop.time(), error.retry_after_s)
            raise
        except (DeadlineExceeded, asyncio.CancelledError):
            if loop.time() - asked_at >= enough_s:
                breaker.failed(loop.time())
            raise
        except Unavailable:
            raise  # it cannot be reached, which is not overload; others are tried first
        except PenstockError:
            breaker.succeeded()
            raise
        else:
            breaker.succeeded()
            return verdict
        finally:
            breaker.ended()

    def _breaker(self, instance_id: str) -> CircuitBreaker:
        """The circuit breaker of a judge; those of judges that have left are removed."""
        if instance_id not in self._breakers:
            known = {judge.instance_id for judge in self._pool.judges()}
            self._breakers = {name: breaker for name, breaker in self._breakers.items() if name in known}
            self._breakers[instance_id] = CircuitBreaker(self._limits.judge_open_s)
        return self._breakers[instance_id]

    async def _ask(self, address: str, request: pb.ScoreRequest, timeout_s: float, tier: str) -> JudgedScore:
        stub = judge_pb2_grpc.JudgeServiceStub(self._channels.get(address, Role.JUDGE))
        name = "penstock.judge.v1.JudgeService/Score"
        with telemetry.client_span(self._tracer, name, **{"penstock.tier": tier}) as span:
            with errors.of_calls():
                answer = await stub.Score(request, timeout=timeout_s, metadata=telemetry.inject())
            result = answer.results[0]
            span.set_attribute("penstock.score", result.score)
            if result.reason:
                span.set_attribute("penstock.score_reason", result.reason)
            return JudgedScore(result.score, answer.scorer, result.reason, answer.uncalibrated)


class NoJudgeAsked(Unavailable):
    """No judge may be called for a while, or there is none."""


def _reason(error: Exception) -> str:
    """Why an answer has no score: the label of the metric."""
    match error:
        case TimeoutError() | DeadlineExceeded():
            return "timeout"
        case Overloaded():
            return "refused"
        case NoJudgeAsked():
            return "open"
        case Unavailable():
            return "unavailable"
    return "invalid"
