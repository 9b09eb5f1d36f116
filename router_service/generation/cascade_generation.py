"""One request through the tiers of its route, until an answer is accepted."""

import asyncio
import logging
from collections.abc import Container, Coroutine
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.trace import INVALID_SPAN, Tracer

from router_service.clients.judge_client import JudgeClient, Verdict
from router_service.domain.events import (
    Accepted,
    Escalated,
    EscalationReason,
    Judged,
    RequestOutput,
    RouterRequest,
    TierStarted,
)
from router_service.domain.failures import FailureHistory
from router_service.domain.reply_promise import ReplyPromise
from router_service.generation import cascade
from router_service.generation.attempt import TierDone
from router_service.generation.cascade import Escalate
from router_service.generation.early_rejection import EARLY_INTERVAL_S, EarlyCheckCounter, EarlyRejection
from router_service.generation.rejected_answers import RejectedAnswers
from router_service.generation.reply_assembler import TierEvent
from router_service.generation.tier_answer import TierAnswer, offers_tools, resumed_ids, span_name
from router_service.generation.tier_generation import TierGeneration
from router_service.generation.tier_promises import TierPromises
from router_service.generation.tier_times import TierTimes
from router_service.routing.burst_steps import BurstSteps, TakenStep
from services import telemetry
from services.background import end
from services.domain.errors import (
    DeadlineExceeded,
    NotFound,
    PenstockError,
    PromptTooLong,
    Unavailable,
    UnsupportedByModel,
    invalid,
)
from services.domain.mesh_view import MeshView
from services.domain.plans import CASCADE_MODEL, Plan, TierPlan
from services.domain.requests import (
    Draft,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenFrame,
    TokenUsage,
)
from services.domain.score_prediction import ScorePredictor, prompt_text
from services.domain.values import replaced
from services.random_bits import random_bits
from services.reasoning import reasoning_parser

_log = logging.getLogger(__name__)

UNSTREAMED_INTERVAL_S = 0.25
"""How long tokens of a reply that is not streamed may wait at the worker for others. If the worker dies, those that have not
been sent are computed again."""


class CascadeGeneration:
    """Generates with one tier after another; without state of any request."""

    def __init__(
        self,
        view: MeshView,
        tiers: TierGeneration,
        judge: JudgeClient,
        tracer: Tracer,
        flag_below: float | None = None,
        undrafted: Container[str] = (),
        predictor: ScorePredictor | None = None,
        early_checks: EarlyCheckCounter | None = None,
        bursts: BurstSteps | None = None,
    ) -> None:
        """flag_below: answers that are returned without being judged before are judged, too, and flagged below this score.

        undrafted: tiers that are not given rejected answers as drafts. predictor: of the scores for which tiers are passed
        over; None: none is. early_checks: counts them; None: no answer is scored before it is finished. bursts: chooses the
        thresholds of requests where the plan has a burst ladder; None: they are always the plan's own.
        """
        self._view, self._tiers, self._judge, self._tracer = view, tiers, judge, tracer
        self._times = TierTimes()
        self._promises = TierPromises(self._times)
        self._flag_below, self._undrafted = flag_below, undrafted
        self._predictor, self._early_checks = predictor, early_checks
        self._bursts = bursts
        self._unpredicted_revision = -1  # of the last plan that asks for predictions which this router cannot make

    async def generate(self, request: RouterRequest, output: RequestOutput, answers: list[TierAnswer]) -> TierAnswer:
        """The accepted answer, after it has been passed to `output`. The plan is the current one for the whole request.

        answers: to which the answers of all tiers are appended, the failed ones included.

        Raises:
            PenstockError: See `RequestDriver.run`.
        """
        plan = self._view.plan
        if plan is None:
            raise Unavailable("no plan has been published yet")
        rejected = RejectedAnswers(keeps_best=plan.best_answer)
        try:
            return await self._generate(request, plan, output, answers, rejected)
        finally:
            rejected.end()

    async def _generate(
        self,
        request: RouterRequest,
        plan: Plan,
        output: RequestOutput,
        answers: list[TierAnswer],
        rejected: RejectedAnswers,
    ) -> TierAnswer:
        """The accepted answer, as in `generate`. rejected: keeps those that are not accepted."""
        route = cascade.route(plan, request.model)
        sampling = request.sampling.with_seed(random_bits.below(63))
        assert sampling.seed is not None
        at = _entry(plan, route, request)
        taken = self._burst_step(plan, request)
        if taken is not None:
            route = cascade.at_step(route, taken.step)
        step = taken.index if taken is not None else None
        output.event(Accepted(request.request_id, plan.revision, sampling.seed, step))
        history = FailureHistory()
        prediction = Draft(request.prediction) if request.prediction else None
        predicted = self._predicted(plan, route, request)
        loop = asyncio.get_running_loop()
        while True:
            tier = route[at]
            # An answer that is resumed has been accepted before.
            is_resumed = resumed_ids(request, tier) is not None
            may_escalate = cascade.judged_at(route, at) and not is_resumed
            # The last tier's answer is held, too, if there is another one that may be delivered instead.
            held = may_escalate or (
                rejected.best is not None and self._promises.allows_holding_last(request, tier, loop.time())
            )
            low_score = cascade.passed_over(route, at, predicted) if may_escalate else None
            if low_score is not None:
                reason = EscalationReason.PREDICTED_SCORE_LOW
                output.event(Escalated(tier.name, route[at + 1].name, reason, low_score))
                at += 1
                continue
            promise = self._promises.of(request, route, at, loop.time(), held=held)
            if may_escalate and promise is None and request.promise is not None:
                output.event(Escalated(tier.name, route[at + 1].name, EscalationReason.TOO_LATE))
                at += 1
                continue
            # The part of a resumed answer that this router does not have cannot be judged.
            stored = self._flag_below is not None and not held and not is_resumed
            answer = self._begin(tier, request, output, promise, held=held, stored=stored)
            answer.burst_step, answer.predicted = step, predicted
            accepts_tie = taken is None or not may_escalate or taken.tie_accepted(sampling.seed, at)
            answers.append(answer)
            try:
                draft = prediction if rejected.draft is None or tier.name in self._undrafted else rejected.draft
                await self._answer(request, plan, sampling, answer, output, history, draft, may_give_up=may_escalate)
                if answer.declined:
                    escalation = cascade.unable(route, at, EscalationReason.SLO_DECLINED) if may_escalate else None
                elif answer.rejected_early:
                    escalation = cascade.unable(route, at, EscalationReason.REJECTED_EARLY)
                else:
                    escalation = None
                    if held:
                        escalation = await self._judged(request, plan, route, at, answer, output, accepts_tie, rejected)
                    if stored:
                        await self._flagged(request, plan, answer, output)
            except (Unavailable, PromptTooLong, UnsupportedByModel) as error:
                answer.end(error)
                escalation = cascade.unable(route, at, _why_unable(error)) if may_escalate else None
                if escalation is None:
                    raise
            except BaseException as error:
                answer.end(error)
                raise
            else:
                answer.accepted = escalation is None and not answer.declined and answer.better is None
                answer.end()
            if escalation is None:
                return _delivered(answer, rejected)
            output.event(Escalated(tier.name, route[escalation.to].name, escalation.reason))
            rejected.add(answer)
            at = escalation.to

    async def _answer(
        self,
        request: RouterRequest,
        plan: Plan,
        sampling: SamplingParams,
        answer: TierAnswer,
        output: RequestOutput,
        history: FailureHistory,
        draft: Draft | None,
        *,
        may_give_up: bool,
    ) -> None:
        """One tier's answer; its tokens are taken by `answer`. may_give_up: as in `TierGeneration.generate`."""
        tier = answer.tier.name
        is_judged = answer.held or answer.stored
        if is_judged and sampling.top_logprobs is None and await self._judge.needs_logprobs(plan.scorer):
            sampling = replaced(sampling, top_logprobs=0)
        early = await self._early(request, plan, answer) if answer.tier.early_checks else None
        # Tokens with a promised pace do not wait for others, although their client may read them at the end only.
        has_pace = answer.promise is not None and answer.promise.has_pace
        may_wait = answer.held or not (request.streamed or has_pace)
        generation = GenerationRequest(
            request_id=worker_request_id(request.request_id, tier),
            prompt=request.prompt,
            sampling=sampling,
            resume_token_ids=resumed_ids(request, answer.tier) or (),
            priority=request.priority,
            output_interval_s=(UNSTREAMED_INTERVAL_S if early is None else EARLY_INTERVAL_S) if may_wait else None,
            draft=draft,
            cache_salt=request.cache_salt,
        )

        def on_event(event: TierEvent) -> None:
            answer.saw(event)
            if isinstance(event, TierStarted):
                answer.tool_format, answer.tokenizer_digest = self._model_of(event.instance_id)
                answer.reasoning = reasoning_parser(
                    self._reasoning_format(event.instance_id), request.prompt, request.sampling
                )
            output.event(event)

        def on_tokens(frame: TokenFrame) -> None:
            answer.take(frame)
            if early is not None:
                early.has(answer.output_tokens)

        generating = self._tiers.generate(
            tier,
            generation,
            request.deadline_s,
            telemetry.context_of(answer.span),
            on_event=on_event,
            on_tokens=on_tokens,
            may_give_up=may_give_up,
            history=history,
            promise=answer.promise,
        )
        answer.done = await generating if early is None else await _unless_rejected(generating, early, answer)
        if answer.first_token_at is not None and not answer.rejected_early:
            now_s = asyncio.get_running_loop().time()
            self._times.answered(tier, answer.started_at, answer.first_token_at, now_s)

    def _predicted(self, plan: Plan, route: tuple[TierPlan, ...], request: RouterRequest) -> dict[str, float]:
        """The predicted score of each tier's answer; empty if no tier could be passed over for it."""
        if all(tier.skip_below is None for tier in route[:-1]):
            return {}
        if self._predictor is None:
            if plan.revision != self._unpredicted_revision:
                self._unpredicted_revision = plan.revision
                _log.warning("plan %d has skip_below, but router.score_predictor is not set", plan.revision)
            return {}
        text = prompt_text(request.prompt)
        return {} if text is None else self._predictor.predict(text)

    def _burst_step(self, plan: Plan, request: RouterRequest) -> TakenStep | None:
        """The step of a request of the cascade that begins here; None if the plan's own thresholds hold."""
        if self._bursts is None or request.model != CASCADE_MODEL or request.resume is not None:
            return None
        return self._bursts.take(plan)

    async def _early(self, request: RouterRequest, plan: Plan, answer: TierAnswer) -> EarlyRejection | None:
        """The early checks of an answer; None without any, and where the scorer does not score unfinished answers."""
        checks = answer.tier.early_checks
        if not answer.held or not checks or self._early_checks is None:
            return None
        if not await self._judge.scores_unfinished(plan.scorer):
            return None

        async def score() -> float | None:
            if not answer.content.strip():  # nothing, or reasoning only
                return None
            verdict = await self._score(request, plan, answer, unfinished=True)
            return None if verdict is None else verdict.score

        return EarlyRejection(answer.tier.name, checks, score, self._early_checks)

    async def _judged(
        self,
        request: RouterRequest,
        plan: Plan,
        route: tuple[TierPlan, ...],
        at: int,
        answer: TierAnswer,
        output: RequestOutput,
        accepts_tie: bool,
        rejected: RejectedAnswers,
    ) -> Escalate | None:
        """Have an answer judged; None if it is accepted, or a better one of those that were `rejected` before it.

        accepts_tie: as in `cascade.decide`.

        Raises:
            DeadlineExceeded: The deadline passed meanwhile.
        """
        asked_s = asyncio.get_running_loop().time()
        verdict = await self._score(request, plan, answer)
        self._times.judged(asked_s, asyncio.get_running_loop().time())
        answer.score = verdict.score if verdict is not None else None
        reason = verdict.reason if verdict is not None else ""
        tokens = cascade.counted_tokens(answer.output_tokens, reason)
        decision = cascade.decide(plan, route, at, answer.score, accepts_tie=accepts_tie, counted_tokens=tokens)
        escalation = decision if isinstance(decision, Escalate) else None
        if asyncio.get_running_loop().time() >= request.deadline_s:
            raise DeadlineExceeded("the deadline passed while the answer was judged")
        answer.score_reason = reason
        scorer = verdict.scorer if verdict is not None else plan.scorer
        threshold = cascade.lowest_accepted(answer.tier, tokens)
        if escalation is None:
            answer.better = rejected.better_than(answer)
        if not cascade.judged_at(route, at):
            threshold, delivered = self._flag_below or 0.0, answer.better or answer
            delivered.flagged = cascade.flagged(delivered.score, threshold)
        accepted = escalation is None and answer.better is None
        better_tier = answer.better.tier.name if answer.better is not None else ""
        output.event(
            Judged(answer.tier.name, answer.score, threshold, accepted, scorer, reason, answer.flagged, better_tier)
        )
        return escalation

    async def _flagged(self, request: RouterRequest, plan: Plan, answer: TierAnswer, output: RequestOutput) -> None:
        """Have an answer judged that has been passed on already; without a score, it is not flagged."""
        assert self._flag_below is not None
        verdict = await self._score(request, plan, answer)
        if verdict is None:
            output.event(Judged(answer.tier.name, None, self._flag_below, True, plan.scorer))
            return
        answer.score, answer.score_reason = verdict.score, verdict.reason
        answer.flagged = cascade.flagged(verdict.score, self._flag_below)
        output.event(
            Judged(
                answer.tier.name, verdict.score, self._flag_below, True, verdict.scorer, verdict.reason, answer.flagged
            )
        )

    async def _score(
        self, request: RouterRequest, plan: Plan, answer: TierAnswer, *, unfinished: bool = False
    ) -> Verdict | None:
        assert unfinished or answer.done is not None
        token = otel_context.attach(telemetry.context_of(answer.span))
        try:
            return await self._judge.score(
                plan.scorer,
                request.prompt,
                answer.content,
                answer.tier.name,
                answer.done.reason if answer.done is not None else FinishReason.STOP,
                [position for frame in answer.frames for position in frame.logprobs],
                request.deadline_s,
                answer.tool_format,
                request.sampling.structured_output,
                unfinished=unfinished,
            )
        finally:
            otel_context.detach(token)

    def _begin(
        self,
        tier: TierPlan,
        request: RouterRequest,
        output: RequestOutput,
        promise: ReplyPromise | None,
        *,
        held: bool,
        stored: bool,
    ) -> TierAnswer:
        texts: list[str] | None = None
        if offers_tools(request):
            resumed = request.resume is not None and request.resume.tier == tier.name
            texts = [request.resume.text] if request.resume is not None and resumed else []
        return TierAnswer(
            tier,
            asyncio.get_running_loop().time(),
            self._tracer.start_span(span_name(tier)) if telemetry.is_traced() else INVALID_SPAN,
            held=held,
            stored=stored,
            with_logprobs=request.sampling.top_logprobs is not None,
            on_answer=output.answer,
            texts=texts,
            promise=promise,
        )

    def _model_of(self, instance_id: str) -> tuple[str, str]:
        """How an instance's model writes tool calls, and its tokenizer's digest; empty if the instance has left."""
        record = self._view.find(instance_id)
        if record is None or record.model is None:
            return "", ""
        return record.model.tool_format, record.model.tokenizer_digest

    def _reasoning_format(self, instance_id: str) -> str:
        """How an instance's model marks its reasoning; empty if it has no marks or has left the mesh."""
        record = self._view.find(instance_id)
        return record.model.reasoning_format if record is not None and record.model is not None else ""


def _entry(plan: Plan, route: tuple[TierPlan, ...], request: RouterRequest) -> int:
    """Index of the tier at which the route begins: the first one, or the one whose reply is resumed.

    Raises:
        NotFound: The plan has no such tier.
        InvalidRequest: The tier is not on this route.
    """
    if request.resume is None:
        return 0
    for i, tier in enumerate(route):
        if tier.name == request.resume.tier:
            return i
    if plan.tier(request.resume.tier) is None:
        raise NotFound("tier", request.resume.tier)
    raise invalid("resume.tier", f"'{request.resume.tier}' is not on the way of model '{request.model[:80]}'")


def _delivered(answer: TierAnswer, rejected: RejectedAnswers) -> TierAnswer:
    """Pass on `answer`, which may be accepted, or the better one before it; return it. The other one is dropped."""
    if answer.better is not None:
        answer.better.accepted = True
        answer.drop()
        answer = answer.better
    elif rejected.best is not None:
        rejected.best.drop()
    answer.end_span()
    answer.release()
    return answer


async def _unless_rejected(
    generating: Coroutine[Any, Any, TierDone], early: EarlyRejection, answer: TierAnswer
) -> TierDone:
    """The end of an answer, which is cancelled at its worker if an early check rejects it.

    Raises:
        PenstockError: That of the generation.
    """
    generation = asyncio.ensure_future(generating)
    rejection = asyncio.ensure_future(early.rejecting_score())
    try:
        await asyncio.wait((generation, rejection), return_when=asyncio.FIRST_COMPLETED)
        if not generation.done() and (score := await rejection) is not None:
            answer.rejected_early, answer.score_reason = True, EscalationReason.REJECTED_EARLY.value
            answer.span.add_event("rejected early", {"penstock.score": score, "penstock.tokens": answer.output_tokens})
            return TierDone(FinishReason.ABORTED, TokenUsage(answer.prompt_tokens, 0, answer.output_tokens), None)
        return await generation
    finally:
        await end(generation, rejection)


def _why_unable(error: PenstockError) -> EscalationReason:
    """Why a tier could not answer, by the error of its last attempt."""
    match error:
        case PromptTooLong():
            return EscalationReason.PROMPT_TOO_LONG
        case UnsupportedByModel():
            return EscalationReason.UNSUPPORTED_BY_MODEL
    return EscalationReason.TIER_UNAVAILABLE


def worker_request_id(request_id: str, tier: str) -> str:
    """The id of a request's reply by one tier; the id of each attempt at a worker begins with it."""
    return f"{request_id}:{tier}"
