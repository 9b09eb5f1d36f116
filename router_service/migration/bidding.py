"""The sender's agent: when a worker advises a move, the router that owns the stream chooses the target.

It gets bids from the candidates, chooses by the rules of `services.domain.stages.bidding`, confirms, waits for the turn at
the receiver and has the reply move. If anything fails, the reply continues where it is.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager, suppress

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Span, Tracer

from penstock.router_service.clients.worker_client import Confirmation, Metadata, WorkerClient
from penstock.router_service.migration.movable_reply import MAX_MOVE_S, MovableReply
from penstock.services import telemetry
from penstock.services.domain.errors import PenstockError, Unavailable
from penstock.services.domain.instances import InstanceRecord
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.stages.bidding import Ask, Bid, choose
from penstock.services.domain.stages.places import by_preference, outgrown_to, peers
from penstock.services.mesh_schema.stages import MeshStages
from penstock.types.mesh_status import ReplyMoved
from penstock.types.workers import MoveAdvice, MoveReason, NotMoved

_log = logging.getLogger(__name__)


LATER_BIDS_S = 0.05
"""Receivers that are as quick as the first have replied by then; one that is slower is busy or does not reply."""


def candidates(workers: Seq[InstanceRecord], sender: InstanceRecord, advice: MoveAdvice) -> list[InstanceRecord]:
    """The workers to get bids from, in order of id: of the next stage that covers a request that outgrew its stage, of the
    sender's own stage if it is overloaded, of the stage that suits the length best if it drains."""
    others = {r.instance_id: r for r in workers if r.instance_id != sender.instance_id}
    places = {i: record.place for i, record in others.items()}
    stage = sender.place.stage if sender.place is not None else None
    match advice.reason:
        case MoveReason.DRAINING:
            targets = next(iter(by_preference(places, advice.tokens)), [])
        case MoveReason.RANGE_CROSSED:
            targets = outgrown_to(places, stage, advice.tokens) if stage is not None else []
        case MoveReason.OVERLOADED:
            targets = peers(places, stage) if stage is not None else []
    return [others[i] for i in targets]


class MoveAgent:
    """Follows workers' advice to move replies; its only state is counters."""

    def __init__(self, view: MeshView, workers: WorkerClient, tracer: Tracer, meter: Meter, limits: MeshStages) -> None:
        self._view, self._workers, self._tracer, self._limits = view, workers, tracer, limits
        self._followed = meter.create_counter(
            "penstock.router.move_advice", unit="{advice}", description="Advice followed, by reason and outcome."
        )
        self.moved = self.stayed = 0
        """Number of advices that ended in a move, and that did not."""

    async def follow(
        self, tier: str, reply: MovableReply, request_id: str, advice: MoveAdvice, parent: Context
    ) -> ReplyMoved | NotMoved:
        """Have a reply move as its worker advised, if a worker takes it. request_id: of the attempt."""
        sender_id = reply.record.instance_id
        attributes = {"penstock.tier": tier, "penstock.reason": advice.reason.value}
        described: dict[str, str | int | float] = {
            **attributes,
            "penstock.from": sender_id,
            "penstock.sequence_tokens": advice.tokens,
        }
        span = telemetry.child_span(self._tracer, "migration", described, parent=parent)
        outcome: ReplyMoved | NotMoved = NotMoved("interrupted")
        try:
            outcome = await self._follow(tier, reply, request_id, advice, span, parent)
        except PenstockError as error:
            outcome = NotMoved(str(error))
        finally:
            if isinstance(outcome, ReplyMoved):
                result, self.moved = "moved", self.moved + 1
                moved = {f"penstock.{name}": getattr(outcome, name) for name in ("offset", "stall_s", "sent_bytes")}
                span.set_attributes(moved)
            else:
                result, self.stayed = "stayed", self.stayed + 1
                span.set_attribute("penstock.not_moved", outcome.reason)
            self._followed.add(1, attributes | {"penstock.outcome": result})
            span.end()
        return outcome

    async def _follow(
        self, tier: str, reply: MovableReply, request_id: str, advice: MoveAdvice, span: Span, parent: Context
    ) -> ReplyMoved | NotMoved:
        context = telemetry.context_of(span, parent)
        async with self._arranged(tier, reply.record.instance_id, request_id, advice, context) as (
            target,
            confirmation,
        ):
            span.set_attribute("penstock.to", target.instance_id)
            return await self._move(reply, target, confirmation, advice)

    async def _move(
        self, reply: MovableReply, target: InstanceRecord, confirmation: Confirmation, advice: MoveAdvice
    ) -> ReplyMoved | NotMoved:
        """Have the reply move when it has its turn. The limit for it is lifted when the transfer starts, or is certain to."""

        async def started() -> None:
            turn_limit.reschedule(None)
            await confirmation.started()

        try:
            async with asyncio.timeout(self._limits.turn_timeout_s) as turn_limit:
                while True:
                    starving = await confirmation.turn()
                    if starving:
                        turn_limit.reschedule(
                            None
                        )  # its sender sends it next; `MAX_MOVE_S` limits the wait and the transfer
                    outcome = await reply.move(target, advice.reason.value, starving=starving, on_started=started)
                    if isinstance(outcome, ReplyMoved) or not outcome.busy:
                        return outcome
                    await confirmation.sender_busy()
        except TimeoutError:
            return NotMoved(f"it got no turn within {self._limits.turn_timeout_s:g} s")

    @asynccontextmanager
    async def _arranged(
        self, tier: str, sender_id: str, request_id: str, advice: MoveAdvice, parent: Context
    ) -> AsyncIterator[tuple[InstanceRecord, Confirmation]]:
        """A receiver whose queue holds the request as long as the context lasts.

        Raises:
            Unavailable: No worker takes it.
        """
        sender = self._view.find(sender_id)
        if sender is None or sender.model is None:
            raise Unavailable("the sender has left")
        ask = Ask(request_id, sender_id, advice.tokens, advice.sender_tokens)
        receivers = {r.instance_id: r for r in candidates(self._view.workers(tier), sender, advice)}
        described = {
            "penstock.request_id": request_id,
            "penstock.reason": advice.reason.value,
            "penstock.sequence_tokens": advice.tokens,
            "penstock.candidates": len(receivers),
        }
        span = telemetry.child_span(self._tracer, "bid-ask", described, parent=parent)
        with trace.use_span(span, end_on_exit=True):
            metadata = telemetry.inject(telemetry.context_of(span, parent))
            bids = await self._bids(receivers, ask, sender.model.digest, metadata)
            best = choose(bids)
            span.set_attribute("penstock.bids", len(bids))
            span.set_attribute("penstock.target", best.receiver_id if best is not None else "")
        if best is None:
            raise Unavailable("no worker takes it")
        target = receivers[best.receiver_id]
        timeout_s = self._limits.turn_timeout_s + MAX_MOVE_S
        async with self._workers.confirmed(
            target.address, ask, sender.model.digest, timeout_s=timeout_s, metadata=metadata
        ) as confirmation:
            yield target, confirmation

    async def _bids(self, receivers: dict[str, InstanceRecord], ask: Ask, digest: str, metadata: Metadata) -> list[Bid]:
        """The bids in the order of their arrival, without workers that refuse, fail or are late.

        Once there is a bid, the others have `LATER_BIDS_S`: a worker that does not reply holds up no move.
        """
        bids: list[Bid] = []
        bid_limit = asyncio.timeout(None)

        async def one(receiver: InstanceRecord) -> None:
            try:
                answer = await self._workers.ask(
                    receiver, ask, digest, timeout_s=self._limits.bid_timeout_s, metadata=metadata
                )
            except PenstockError as error:
                _log.info("%s: no bid from %s: %s", ask.request_id, receiver.instance_id, error)
                return
            if isinstance(answer, Bid):
                bids.append(answer)
                if len(bids) == 1:
                    bid_limit.reschedule(asyncio.get_running_loop().time() + LATER_BIDS_S)

        with suppress(TimeoutError):
            async with bid_limit:
                await asyncio.gather(*(one(receiver) for receiver in receivers.values()))
        return bids
