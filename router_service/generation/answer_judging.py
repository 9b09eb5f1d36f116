"""Has the answers of a request judged: when they are finished, or when they have been passed on."""

import asyncio

from opentelemetry import context as otel_context

from penstock.router_service.clients.judge_client import JudgeClient, JudgedScore
from penstock.router_service.generation import cascade
from penstock.router_service.generation.cascade import Escalate
from penstock.router_service.generation.cascade_request import CascadeRequest
from penstock.router_service.generation.tier_answer import TierAnswer
from penstock.router_service.generation.tier_times import TierTimes
from penstock.services import telemetry
from penstock.services.acceptance import pipeline
from penstock.services.acceptance.long_answers import counted_tokens
from penstock.services.domain.errors import DeadlineExceeded
from penstock.types.events import Judged
from penstock.types.judging import JudgedAnswer, LogprobSummary


class AnswerJudging:
    """Without state of any request."""

    def __init__(self, judge: JudgeClient, times: TierTimes, flag_below: float | None) -> None:
        """flag_below: see CascadeGeneration."""
        self._judge, self._times, self._flag_below = judge, times, flag_below

    async def needs_logprobs(self, run: CascadeRequest, answer: TierAnswer) -> bool:
        """Whether an answer will be judged by its log probabilities, which its client has not asked for."""
        is_judged = answer.held or answer.stored
        return is_judged and run.sampling.top_logprobs is None and await self._judge.needs_logprobs(run.plan.scorer)

    async def judged(self, run: CascadeRequest, answer: TierAnswer) -> Escalate | None:
        """Have an answer judged; None if it is accepted, or a better one of those that were rejected before it.

        Raises:
            DeadlineExceeded: The deadline passed meanwhile.
        """
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        verdict = await self._score(run, answer)
        self._times.judged(asked_s, loop.time())
        answer.score = verdict.score if verdict is not None else None
        answer.uncalibrated = verdict is not None and verdict.uncalibrated
        reason = verdict.reason if verdict is not None else ""
        tokens = counted_tokens(answer.output_tokens, reason)
        escalation = run.decide(answer.score, tokens)
        if loop.time() >= run.request.deadline_s:
            raise DeadlineExceeded("the deadline passed while the answer was judged")
        answer.score_reason = reason
        threshold = pipeline.lowest_accepted(run.tier, tokens)
        if escalation is None:
            answer.better = run.rejected.better_than(answer)
        if not run.is_judged:
            threshold, delivered = self._flag_below or 0.0, answer.better or answer
            delivered.flagged = cascade.flagged(delivered.score, threshold)
        accepted = escalation is None and answer.better is None
        better_tier = answer.better.tier.name if answer.better is not None else ""
        scorer = verdict.scorer if verdict is not None else run.plan.scorer
        run.output.event(
            Judged(
                answer.tier.name,
                answer.score,
                threshold,
                accepted,
                scorer,
                reason,
                answer.flagged,
                better_tier,
                answer.uncalibrated,
            )
        )
        return escalation

    async def flag(self, run: CascadeRequest, answer: TierAnswer) -> None:
        """Have an answer judged that has been passed on already; without a score, it is not flagged."""
        assert self._flag_below is not None
        tier, verdict = answer.tier.name, await self._score(run, answer)
        if verdict is None:
            run.output.event(Judged(tier, None, self._flag_below, True, run.plan.scorer))
            return
        answer.score, answer.score_reason = verdict.score, verdict.reason
        answer.uncalibrated = verdict.uncalibrated
        answer.flagged = cascade.flagged(verdict.score, self._flag_below)
        run.output.event(
            Judged(
                tier,
                verdict.score,
                self._flag_below,
                True,
                verdict.scorer,
                verdict.reason,
                answer.flagged,
                uncalibrated=verdict.uncalibrated,
            )
        )

    async def _score(self, run: CascadeRequest, answer: TierAnswer) -> JudgedScore | None:
        assert answer.done is not None
        request = run.request
        logprobs = [position.chosen.logprob for frame in answer.frames for position in frame.logprobs]
        token = otel_context.attach(telemetry.context_of(answer.span))
        try:
            return await self._judge.score(
                run.plan.scorer,
                JudgedAnswer(
                    request.prompt,
                    answer.content,
                    answer.tier.name,
                    answer.done.reason,
                    LogprobSummary.of(logprobs) if logprobs else None,
                    tool_format=answer.tool_format,
                    structured_output=request.sampling.structured_output,
                ),
                request.deadline_s,
            )
        finally:
            otel_context.detach(token)
