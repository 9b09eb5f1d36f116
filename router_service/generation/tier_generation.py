"""One tier's reply to one request, whatever happens to the instances that compute it.

An instance that dies, goes silent or drains is replaced: the next one gets the prompt and the tokens so far, and continues at
the same offset. Every token is passed on once, in order. The effect of each failure is defined in `domain/failures.py` and
carried out here.
"""

import asyncio
import logging
import math

from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Tracer

from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.domain.failures import OF_THE_INSTANCE, Cost, Failure, FailureHistory, TryBudget, classify
from penstock.router_service.domain.reply_promise import ReplyPromise
from penstock.router_service.generation.attempt import Attempt, AttemptServices, MoveStalls, SloHops, TierReply
from penstock.router_service.generation.reply_assembler import OnTierEvent, ReplyAssembler, TierEvent
from penstock.router_service.migration.bidding import MoveAgent
from penstock.router_service.migration.movable_reply import MovableReply
from penstock.router_service.routing.instance_pool import MIN_FULL_S, InstancePool
from penstock.router_service.routing.placement import Placed, SloNeed
from penstock.router_service.routing.prefix_affinity import prefixes_of
from penstock.router_service.routing.prompt_length import PromptLengths
from penstock.services import telemetry
from penstock.services.domain.errors import (
    DeadlineExceeded,
    NotFound,
    Overloaded,
    PenstockError,
    PoisonRequest,
    Unavailable,
)
from penstock.services.domain.instances import InstanceRecord
from penstock.services.event_streams import OnTokens
from penstock.services.mesh_schema.router import MeshRouter
from penstock.services.mesh_schema.slo import MeshSlo
from penstock.types.events import TierAdmitted
from penstock.types.mesh_status import ReplyMoved
from penstock.types.replies import FinishReason, Usage
from penstock.types.requests import GenerationRequest
from penstock.types.slo import SloFallback
from penstock.types.workers import EngineFinished, NotMoved

_log = logging.getLogger(__name__)

MAX_TRACED_CALLS = 32
"""Attempts and moves of one reply that have spans; a reply may move any number of times."""


class TierGeneration:
    """Generates at the instances of one tier."""

    def __init__(
        self,
        pool: InstancePool,
        workers: WorkerClient,
        agent: MoveAgent,
        tracer: Tracer,
        policy: MeshRouter,
        meter: Meter,
        hops: MeshSlo,
    ) -> None:
        self._pool, self._policy, self._hops = pool, policy, hops
        self._services = AttemptServices(pool, workers, agent, tracer, MoveStalls())
        failed = "Attempts at workers that failed, by kind of failure."
        self._failures = meter.create_counter("penstock.router.instance_failures", "{failure}", failed)
        given_up = "Requests that were given up because instances died while they worked on them."
        self._poison = meter.create_counter("penstock.router.poison_requests", "{request}", given_up)
        self._lengths = PromptLengths()
        self._replies: dict[str, MovableReply] = {}

    async def generate(
        self,
        tier: str,
        request: GenerationRequest,
        deadline_s: float,
        parent: Context,
        *,
        on_event: OnTierEvent,
        on_tokens: OnTokens,
        may_give_up: bool,
        history: FailureHistory,
        promise: ReplyPromise | None,
    ) -> EngineFinished:
        """Generate one reply; return its end. Cancelling cancels it at its worker.

        Reason DECLINED: no instance could keep the promise, and its fallback is to decline. A decline is an answer: no
        instance is ejected for it, and no attempt is spent; the next instance is tried, as far as the limits of hops allow.

        on_event, on_tokens: called with all other events and with the reply's frames, in order, each token once. They may not
        block, and are called by the task that reads the worker's call.
        may_give_up: if there is no instance to try at the start, raise Unavailable at once instead of waiting for one.
        history: failures of the request in all tiers. promise: the SLO of this reply.

        Raises:
            InvalidRequest, PromptTooLong, MessageTooLarge, RequestFailed: The request itself is at fault.
            PoisonRequest: Too many instances died while they worked on it.
            Overloaded: The tier's workers are full and refused too often.
            Unavailable, DeadlineExceeded: No instance could be tried, or all that were tried failed.
        """
        prompt, loop = request.prompt, asyncio.get_running_loop()
        prefixes = prefixes_of(prompt, request.cache_salt)

        def pass_event(event: TierEvent) -> None:
            if isinstance(event, TierAdmitted):
                self._lengths.learn(tier, prompt, event.prompt_tokens)
            on_event(event)

        prompt_tokens = self._lengths.estimate(tier, prompt)
        assembler = ReplyAssembler(tier, request.resume_token_ids, prompt_tokens, pass_event, on_tokens)
        fallback = promise.fallback if promise is not None else SloFallback.BEST_EFFORT
        hops, spans = SloHops(self._hops, fallback, loop.time()), telemetry.SpanBudget(MAX_TRACED_CALLS)
        reply = TierReply(request, deadline_s, parent, assembler, history, promise, hops, spans, may_give_up)
        budget = TryBudget(self._policy.max_attempts, self._policy.max_refusals)
        failed_id, reason = "", ""
        while True:
            placed = await self._place(reply, failed_id, self._pool.prefix_affinity.where(tier, prefixes))
            begun, now_s = bool(assembler.token_ids), loop.time()
            if placed is None or hops.is_declined(placed.record.instance_id, now_s, begun=begun):
                return EngineFinished(FinishReason.DECLINED, Usage())
            assembler.try_instance(placed.record.instance_id, reason)
            declines = hops.asks_to_decline(placed.others, now_s, begun=begun)
            try:
                done = await self._attempt(reply, placed.record, declines=declines)
            except PenstockError as error:
                failed_id = assembler.instance_id
                failure = self._record_failure(reply, failed_id, error)
                if failure.rule.cost is Cost.END:
                    raise
                if assembler.is_full_length:  # the instance died between the last token and the end
                    return EngineFinished(FinishReason.LENGTH, Usage(0, 0, len(assembler.token_ids)))
                if history.is_poisonous(self._policy.max_deaths):
                    self._poison.add(1, {"penstock.tier": tier})
                    deaths = history.deaths
                    _log.warning("%s: given up, %d instances died while they had it", request.request_id, deaths)
                    raise PoisonRequest(deaths) from error
                if isinstance(error, Overloaded):
                    self._pool.is_full(failed_id, error.retry_after_s)
                    reason = reason or "full"
                else:
                    reason = str(error)
                if failure is Failure.CALL_BROKEN:  # not again at once: the next call to it may break as well
                    self._pool.is_full(failed_id, MIN_FULL_S)
                if not budget.spend(failure):
                    if failure.rule.shown:
                        raise
                    raise Unavailable(f"tier {tier}: no instance could complete it, the last one: {error}") from error
                continue
            if done.reason is FinishReason.DECLINED:
                hops.declined.add(placed.record.instance_id)
                continue
            self._pool.prefix_affinity.learn(tier, prefixes, assembler.instance_id)
            self._pool.succeeded(assembler.instance_id)
            return done

    async def move(self, request_id: str, target: InstanceRecord, why: str) -> ReplyMoved | NotMoved:
        """Have an active reply continue on another instance of its tier; return when it does, or will not.

        request_id: as given to `generate`. why: for the client's InstanceChanged event.

        Raises:
            NotFound: No such reply is active.
        """
        reply = self._replies.get(request_id)
        if reply is None:
            raise NotFound("active reply", request_id)
        outcome = await reply.move(target, why, starving=True)
        self._services.stalls.add(outcome)
        return outcome

    async def _attempt(self, reply: TierReply, record: InstanceRecord, *, declines: bool) -> EngineFinished:
        """The rest of the reply, from one instance. declines: the instance shall decline what it cannot keep."""

        def failed_meanwhile(failed: InstanceRecord, error: PenstockError) -> None:
            if classify(error) in OF_THE_INSTANCE:
                self._record_failure(reply, failed.instance_id, error)

        attempt = Attempt(
            self._services,
            reply,
            record,
            on_failure=failed_meanwhile,
            may_move=lambda: not reply.history.is_poisonous(self._policy.max_deaths),
            declines=declines,
        )
        request_id = reply.request.request_id
        self._replies[request_id] = attempt.reply
        try:
            return await attempt.run()
        finally:
            if self._replies.get(request_id) is attempt.reply:
                del self._replies[request_id]

    def _record_failure(self, reply: TierReply, instance_id: str, error: PenstockError) -> Failure:
        """Count a failure of an instance, and eject the instance if the table says so."""
        request_id, assembler = reply.request.request_id, reply.assembler
        failure = classify(error, leaving=self._pool.is_leaving(instance_id))
        self._failures.add(1, {"penstock.tier": assembler.tier, "penstock.failure": failure.value})
        _log.info("%s at %s: %s: %s", request_id, instance_id, failure.value, error)
        ejection = reply.history.record(failure, instance_id, assembler.new_tokens(instance_id))
        self._pool.record_failure(instance_id, request_id, ejection)
        return failure

    async def _place(self, reply: TierReply, avoid: str, prefix_holder: str) -> Placed | None:
        """The instance to try next, as soon as there is one; None if the reply is declined before there is one.

        Raises:
            Unavailable: None has been there to try, and none has been loading, for `tier_wait_s`; at once if the reply may be
                given up and has not begun.
            DeadlineExceeded: The deadline passed.
        """
        loop, number, tier = asyncio.get_running_loop(), self._pool.queue.number(), reply.assembler.tier
        tokens, promise, deadline_s = reply.tokens, reply.promise, reply.deadline_s
        wait_s = self._policy.tier_wait_s if reply.assembler.reported or not reply.may_give_up else 0.0
        give_up_at = loop.time() + wait_s
        due_s, need = math.inf, None
        if promise is not None:
            need = SloNeed(tokens, promise.next_token_due_s(), reply.hops.declined)
            if reply.hops.gives_up_waiting(begun=bool(reply.assembler.token_ids)):
                due_s = promise.first_token_due_s
        while True:
            result = self._pool.place(
                tier, reply.request.request_id, tokens, avoid=avoid, prefix_holder=prefix_holder, slo=need
            )
            if isinstance(result, Placed):
                return result
            now = loop.time()
            if now >= due_s:
                return None
            if now >= deadline_s:
                raise DeadlineExceeded(f"the deadline passed while tier {tier} had no place")
            if wait_s and self._pool.view.loading(tier):
                give_up_at = now + wait_s
            if not result.full and now >= give_up_at:
                reason = self._pool.view.unreadable_reason
                raise Unavailable("; ".join(filter(None, (f"tier {tier} has no instance to try", reason))))
            until_s = min(due_s, deadline_s if now >= give_up_at else min(deadline_s, give_up_at))
            await self._pool.queue.wait(tier, number, until_s)
