"""One request through the tiers of its route, until an answer is accepted."""

import asyncio
import logging
import secrets
from collections.abc import Container

from opentelemetry.trace import INVALID_SPAN, Tracer

from penstock.router_service.clients.judge_client import JudgeClient
from penstock.router_service.domain.events import RequestOutput, RouterRequest
from penstock.router_service.generation import cascade
from penstock.router_service.generation.answer_judging import AnswerJudging
from penstock.router_service.generation.cascade import CascadeRequest, Escalate, entry
from penstock.router_service.generation.rejected_answers import RejectedAnswers
from penstock.router_service.generation.reply_assembler import TierEvent
from penstock.router_service.generation.tier_answer import TierAnswer, offers_tools, resumed_ids, span_name
from penstock.router_service.generation.tier_generation import TierGeneration
from penstock.router_service.generation.tier_times import TierTimes
from penstock.router_service.routing.waiting_price import WaitingPrice
from penstock.services import telemetry
from penstock.services.acceptance.pipeline import compares_answers, predicting
from penstock.services.domain.errors import PenstockError, PromptTooLong, Unavailable, UnsupportedByModel
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.score_prediction import ScorePredictor, prompt_text
from penstock.services.reasoning import reasoning_parser
from penstock.types.events import Accepted, EscalationReason, TierStarted
from penstock.types.plans import Plan, TierPlan
from penstock.types.requests import Draft, GenerationRequest
from penstock.types.values import replaced

_log = logging.getLogger(__name__)

UNSTREAMED_INTERVAL_S = 0.25
"""How long tokens of a reply that is not streamed may wait at the worker for others. If the worker dies, those that have not
been sent are computed again."""
_UNABLE: dict[type[PenstockError], EscalationReason] = {
    PromptTooLong: EscalationReason.PROMPT_TOO_LONG,
    UnsupportedByModel: EscalationReason.UNSUPPORTED_BY_MODEL,
}
"""Why a tier could not answer, by the error of its last attempt; otherwise it is unavailable."""


class CascadeGeneration:
    """Generates with one tier after another; without state of any request."""

    def __init__(
        self,
        view: MeshView,
        tiers: TierGeneration,
        judge: JudgeClient,
        tracer: Tracer,
        *,
        flag_below: float | None = None,
        undrafted: Container[str] = (),
        predictor: ScorePredictor | None = None,
        waiting: WaitingPrice | None = None,
    ) -> None:
        """flag_below: answers that are returned without being judged before are judged, too, and flagged below this score.

        undrafted: tiers that are not given rejected answers as drafts. predictor: of the scores for which tiers are passed
        over; None: none is. waiting: moves the limits of tiers with the load; None: load does not matter.
        """
        self._view, self._tiers, self._tracer = view, tiers, tracer
        self._times = TierTimes()
        self._judging = AnswerJudging(judge, self._times, flag_below)
        self._flags, self._undrafted = flag_below is not None, undrafted
        self._predictor, self._waiting = predictor, waiting
        self._unpredicted_revision = -1  # of the last plan that asks for predictions which this router cannot make

    async def generate(self, request: RouterRequest, output: RequestOutput, answers: list[TierAnswer]) -> TierAnswer:
        """The accepted answer, after it has been passed to `output`. The plan is the current one for the whole request.

        answers: to which the answers of all tiers are appended, the failed ones included.

        Raises:
            PenstockError: See `RequestDriver.run`.
        """
        run = self._run(request, output)
        try:
            while True:
                answer = self._begin(run)
                if isinstance(answer, Escalate):  # the tier is not asked
                    run.escalate(answer)
                    continue
                answers.append(answer)
                escalation = await self._answered(run, answer)
                if escalation is None:
                    return _delivered(answer)
                run.escalate(escalation)
                run.rejected.add(answer)
        finally:
            run.rejected.end()

    def _run(self, request: RouterRequest, output: RequestOutput) -> CascadeRequest:
        """A request that begins now.

        Raises:
            Unavailable: There is no plan.
            NotFound, InvalidRequest: There is no such model, or not the tier that is resumed.
        """
        plan = self._view.plan
        if plan is None:
            raise Unavailable("no plan has been published yet")
        route = cascade.route(plan, request.model)
        sampling = request.sampling.with_seed(secrets.randbits(63))
        assert sampling.seed is not None
        at = entry(plan, route, request)
        output.event(Accepted(request.request_id, plan.revision, sampling.seed))
        predicted, rejected = self._predicted(plan, route, request), RejectedAnswers(keeps_best=compares_answers(plan))
        return CascadeRequest(request, plan, output, route, at, sampling, predicted, rejected, self._waiting)

    def _begin(self, run: CascadeRequest) -> TierAnswer | Escalate:
        """The tier's answer, of which there is nothing yet; or to which tier instead, if this one is not asked."""
        if (passed_over := run.passed_over()) is not None:
            return passed_over
        request, now_s = run.request, asyncio.get_running_loop().time()
        # An answer that is accepted in any case is held, too, if there is another one that may be delivered instead.
        held = (run.is_judged and not run.is_resumed) or (
            run.rejected.best is not None and self._times.allows_holding_last(request, run.tier, now_s)
        )
        promise = self._times.promise(request, run.route, run.at, now_s, held=held)
        if promise is None and request.promise is not None and (too_late := run.unable(EscalationReason.TOO_LATE)):
            return too_late
        texts: list[str] | None = None
        if offers_tools(request):
            texts = [request.resume.text] if request.resume is not None and run.is_resumed else []
        return TierAnswer(
            run.tier,
            now_s,
            self._tracer.start_span(span_name(run.tier)) if telemetry.is_traced() else INVALID_SPAN,
            held=held,
            # The part of a resumed answer that this router does not have cannot be judged.
            stored=self._flags and not held and not run.is_resumed,
            with_logprobs=request.sampling.top_logprobs is not None,
            on_answer=run.output.answer,
            texts=texts,
            promise=promise,
            predicted=run.predicted,
        )

    async def _answered(self, run: CascadeRequest, answer: TierAnswer) -> Escalate | None:
        """Have the tier answer; None if that is the end of the request."""
        try:
            await self._answer(run, answer)
            if answer.declined:
                escalation = run.unable(EscalationReason.SLO_DECLINED)
            else:
                escalation = await self._judging.judged(run, answer) if answer.held else None
                if answer.stored:
                    await self._judging.flag(run, answer)
        except (Unavailable, PromptTooLong, UnsupportedByModel) as error:
            answer.end(error)
            reason = _UNABLE.get(type(error), EscalationReason.TIER_UNAVAILABLE)
            escalation = run.unable(reason) if answer.answered_at is None else None
            if escalation is None:
                raise
        except BaseException as error:
            answer.end(error)
            raise
        else:
            answer.accepted = escalation is None and not answer.declined and answer.better is None
            answer.end()
        return escalation

    async def _answer(self, run: CascadeRequest, answer: TierAnswer) -> None:
        """One tier's answer; its tokens are taken by `answer`."""
        request, tier, sampling = run.request, answer.tier.name, run.sampling
        if await self._judging.needs_logprobs(run, answer):
            sampling = replaced(sampling, top_logprobs=0)
        # Tokens with a promised pace do not wait for others, although their client may read them at the end only.
        has_pace = answer.promise is not None and answer.promise.has_pace
        may_wait = answer.held or not (request.streamed or has_pace)
        generation = GenerationRequest(
            request_id=worker_request_id(request.request_id, tier),
            prompt=request.prompt,
            sampling=sampling,
            resume_token_ids=resumed_ids(request, answer.tier) or (),
            priority=request.priority,
            output_interval_s=UNSTREAMED_INTERVAL_S if may_wait else None,
            draft=self._draft(run),
            cache_salt=request.cache_salt,
        )

        def on_event(event: TierEvent) -> None:
            answer.saw(event)
            if isinstance(event, TierStarted):
                self._learn_model(answer, request, event.instance_id)
            run.output.event(event)

        answer.done = await self._tiers.generate(
            tier,
            generation,
            request.deadline_s,
            telemetry.context_of(answer.span),
            on_event=on_event,
            on_tokens=answer.take,
            may_give_up=run.may_escalate,
            history=run.history,
            promise=answer.promise,
        )
        if answer.first_token_at is not None:
            now_s = asyncio.get_running_loop().time()
            self._times.answered(tier, answer.started_at, answer.first_token_at, now_s)

    def _draft(self, run: CascadeRequest) -> Draft | None:
        """What the tier is given as the likely beginning of its answer: a rejected answer, or what the client predicts."""
        if run.rejected.draft is not None and run.tier.name not in self._undrafted:
            return run.rejected.draft
        return Draft(run.request.prediction) if run.request.prediction else None

    def _predicted(self, plan: Plan, route: tuple[TierPlan, ...], request: RouterRequest) -> dict[str, float]:
        """The predicted score of each tier's answer; empty if no tier could be passed over for it."""
        has_limits = any(predicting(tier) for tier in route[:-1])
        if not has_limits and (self._waiting is None or len(route) == 1):
            return {}
        if self._predictor is None:
            if has_limits and plan.revision != self._unpredicted_revision:
                self._unpredicted_revision = plan.revision
                problem = "plan %d skips tiers by predicted scores, but router.score_predictor is not set"
                _log.warning(problem, plan.revision)
            return {}
        text = prompt_text(request.prompt)
        return {} if text is None else self._predictor.predict(text)

    def _learn_model(self, answer: TierAnswer, request: RouterRequest, instance_id: str) -> None:
        """Note what is known of the model that answers; nothing if the instance has left."""
        record = self._view.find(instance_id)
        if record is None or record.model is None:
            return
        answer.tool_format, answer.tokenizer_digest = record.model.tool_format, record.model.tokenizer_digest
        answer.reasoning = reasoning_parser(record.model.reasoning_format, request.prompt, request.sampling)


def _delivered(answer: TierAnswer) -> TierAnswer:
    """Pass on `answer`, which may be accepted, or the better one before it; return it."""
    if answer.better is not None:
        answer.better.accepted = True
        answer.drop()
        answer = answer.better
    answer.end_span()
    answer.release()
    return answer


def worker_request_id(request_id: str, tier: str) -> str:
    """The id of a request's reply by one tier; the id of each attempt at a worker begins with it."""
    return f"{request_id}:{tier}"
