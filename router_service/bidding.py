"""The sender's agent: the router that owns a stream finds where its request goes when the worker advises a move.

Asks all candidates, chooses by the rules of `services.domain.stages.bidding`, confirms, and waits for the turn. What the move
itself is, and who reads the stream meanwhile, is not decided here.
"""

import asyncio
import enum
import logging
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer

from router_service.bid_client import BidClient, Confirmation
from services.domain.errors import PenstockError
from services.domain.instances import InstanceRecord
from services.domain.mesh_view import MeshView
from services.domain.stages.bidding import Ask, Bid, choose
from services.domain.stages.places import by_preference, outgrown_to, peers

_log = logging.getLogger(__name__)


class MoveReason(enum.Enum):
    RANGE_CROSSED = "range_crossed"
    OVERLOADED = "overloaded"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class MoveAdvice:
    """A worker's word that a request should leave it."""

    reason: MoveReason
    tokens: int
    sender_tokens: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A receiver that has won the request."""

    target: InstanceRecord
    confirmation: Confirmation


@dataclass(frozen=True, slots=True)
class BidLimits:
    """bid_s: for bids to come in. turn_s: from the confirmation to the end of the transfer."""

    bid_s: float
    turn_s: float


def candidates(workers: Seq[InstanceRecord], sender: InstanceRecord, advice: MoveAdvice) -> list[InstanceRecord]:
    """Whom to ask, in order of id: for a request that has outgrown its stage the next one that covers it, for an overloaded
    sender its own stage, for a draining one whoever suits the length best."""
    others = {r.instance_id: r for r in workers if r.instance_id != sender.instance_id}
    places = {i: record.place for i, record in others.items()}
    stage = sender.place.stage if sender.place is not None else None
    match advice.reason:
        case MoveReason.DRAINING:
            found = next(iter(by_preference(places, advice.tokens)), [])
        case MoveReason.RANGE_CROSSED:
            found = outgrown_to(places, stage, advice.tokens) if stage is not None else []
        case MoveReason.OVERLOADED:
            found = peers(places, stage) if stage is not None else []
    return [others[i] for i in found]


class MoveAgent:
    """Finds receivers for any number of requests; keeps nothing between them."""

    def __init__(self, view: MeshView, client: BidClient, tracer: Tracer, limits: BidLimits) -> None:
        self._view, self._client, self._tracer, self._limits = view, client, tracer, limits

    @asynccontextmanager
    async def arranged(
        self, tier: str, sender_id: str, request_id: str, advice: MoveAdvice, parent: Context
    ) -> AsyncIterator[Grant | None]:
        """A receiver whose queue holds the request as long as the context lasts; None if nobody takes it."""
        sender = next((r for r in self._view.instances() if r.instance_id == sender_id), None)
        if sender is None or sender.model is None:
            yield None
            return
        ask = Ask(request_id, sender_id, advice.tokens, advice.sender_tokens)
        asked = {r.instance_id: r for r in candidates(self._view.workers(tier), sender, advice)}
        with self._tracer.start_as_current_span(
            "bid-ask",
            context=parent,
            kind=SpanKind.INTERNAL,
            attributes={
                "penstock.request_id": request_id,
                "penstock.reason": advice.reason.value,
                "penstock.sequence_tokens": advice.tokens,
                "penstock.candidates": len(asked),
            },
        ) as span:
            bids = await self._bids(asked, ask, sender.model.digest)
            best = choose(bids)
            span.set_attribute("penstock.bids", len(bids))
            span.set_attribute("penstock.target", best.receiver_id if best is not None else "")
            carrier: dict[str, str] = {}
            propagate.inject(carrier, trace.set_span_in_context(span, parent))
        if best is None:
            yield None
            return
        target = asked[best.receiver_id]
        async with self._client.confirmed(
            target.address, ask, sender.model.digest, timeout_s=self._limits.turn_s, metadata=tuple(carrier.items())
        ) as confirmation:
            yield Grant(target, confirmation)

    async def _bids(self, asked: dict[str, InstanceRecord], ask: Ask, digest: str) -> list[Bid]:
        """The bids, in the order in which they came; who refuses, fails or is late makes none."""
        bids: list[Bid] = []

        async def one(receiver: InstanceRecord) -> None:
            try:
                answer = await self._client.ask(
                    receiver.address, receiver.instance_id, ask, digest, timeout_s=self._limits.bid_s
                )
            except PenstockError as error:
                _log.info("%s: no bid from %s: %s", ask.request_id, receiver.instance_id, error)
                return
            if isinstance(answer, Bid):
                bids.append(answer)

        await asyncio.gather(*(one(receiver) for receiver in asked.values()))
        return bids
