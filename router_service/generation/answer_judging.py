"""Has the answers of a request judged: when they are finished, or when they have been passed on."""

import asyncio

from opentelemetry import context as otel_context

from penstock.router_service.clients.judge_client import JudgeClient
from penstock.router_service.generation import cascade
from penstock.router_service.generation.cascade import CascadeRequest, Escalate
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
        scorer = await self._score(run, answer)
        self._times.judged(asked_s, loop.time())
        tokens = counted_tokens(answer.output_tokens, answer.score_reason)
        escalation = run.decide(answer.score, tokens)
        if loop.time() >= run.request.deadline_s:
            raise DeadlineExceeded("the deadline passed while the answer was judged")
        threshold = pipeline.lowest_accepted(run.tier, tokens)
        if escalation is None:
            answer.better = run.rejected.better_than(answer)
        if not run.is_judged:
            threshold, delivered = self._flag_below or 0.0, answer.better or answer
            delivered.flagged = cascade.flagged(delivered.score, threshold)
        _report(run, answer, threshold, scorer, accepted=escalation is None and answer.better is None)
        return escalation

    async def flag(self, run: CascadeRequest, answer: TierAnswer) -> None:
        """Have an answer judged that has been passed on already; without a score, it is not flagged."""
        assert self._flag_below is not None
        scorer = await self._score(run, answer)
        answer.flagged = cascade.flagged(answer.score, self._flag_below)
        _report(run, answer, self._flag_below, scorer, accepted=True)

    async def _score(self, run: CascadeRequest, answer: TierAnswer) -> str:
        """Note the score of an answer, if a judge gives one; return the name of the scorer."""
        assert answer.done is not None
        request = run.request
        logprobs = [position.chosen.logprob for frame in answer.frames for position in frame.logprobs]
        token = otel_context.attach(telemetry.context_of(answer.span))
        try:
            verdict = await self._judge.score(
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
        if verdict is None:
            return run.plan.scorer
        answer.score, answer.score_reason, answer.uncalibrated = verdict.score, verdict.reason, verdict.uncalibrated
        return verdict.scorer


def _report(run: CascadeRequest, answer: TierAnswer, threshold: float, scorer: str, *, accepted: bool) -> None:
    """Tell the client how an answer was judged."""
    tier, better_tier = answer.tier.name, answer.better.tier.name if answer.better is not None else ""
    reason, flagged = answer.score_reason, answer.flagged
    judged = Judged(tier, answer.score, threshold, accepted, scorer, reason, flagged, better_tier, answer.uncalibrated)
    run.output.event(judged)
