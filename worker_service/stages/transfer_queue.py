"""Runs bid-ask on one instance: bids, queues the requests that it won, and sends one transfer at a time.

The rules are in `services.domain.stages.bidding`; this module runs them on the event loop. A request stays in the queue only
while the call of its agent is active, so an agent that dies leaves nothing behind.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from opentelemetry.metrics import Meter

from penstock.services.domain.instances import Load
from penstock.services.domain.stages.bidding import Ask, Bid, Go, Receiver, RefusalReason, Sender, TransferSlots
from penstock.worker_service.engine.interface import Engine, KvTransferring

ROUND_S = 0.02  # requests with busy senders are tried again after this long
TOKENS_PER_S = 100_000.0  # of a transfer, about: it only affects the order of bids


Turns = asyncio.Queue[bool]
"""When the transfer of a request should start; whether the request is starving."""


class TransferQueue:
    """Both sides of one instance. load: returns its load. max_running: limit on its running requests."""

    def __init__(
        self,
        instance_id: str,
        slots: TransferSlots,
        sender: Sender,
        engine: Engine,
        load: Callable[[], Load],
        meter: Meter,
        *,
        max_running: int,
        tier: str,
    ) -> None:
        self._receiver, self._sender = Receiver(instance_id, slots), sender
        self._engine, self._load, self._max_running = engine, load, max_running
        self._won: dict[str, Turns] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}  # starving requests of this sender
        self._again: asyncio.TimerHandle | None = None
        self._labels = {"penstock.tier": tier}
        self._bids = meter.create_counter("penstock.worker.bids", unit="{bid}", description="Bids made.")
        self._refusals = meter.create_counter(
            "penstock.worker.bid_refusals", unit="{refusal}", description="Refused asks and confirmations, by reason."
        )

    def bid(self, ask: Ask, model_digest: str, *, draining: bool) -> Bid | RefusalReason:
        """The bid of this instance for a request, or the reason for a refusal."""
        load = self._load()
        unfit = self._unfit(load, model_digest, draining=draining)
        bid = unfit or self._receiver.bid(
            ask, load_tokens=load.tokens, idle_tokens=self._idle_tokens(load), tokens_per_s=TOKENS_PER_S
        )
        if isinstance(bid, RefusalReason):
            self._refuse(bid)
        else:
            self._bids.add(1, self._labels)
        return bid

    @contextmanager
    def won(self, ask: Ask, model_digest: str, *, draining: bool) -> Iterator[Turns | RefusalReason]:
        """Queue a request after this instance was chosen, as long as the context lasts; gives a reason if it is refused."""
        load = self._load()
        reason = self._unfit(load, model_digest, draining=draining) or self._receiver.confirm(
            ask, idle_tokens=self._idle_tokens(load)
        )
        if reason is not None:
            self._refuse(reason)
            yield reason
            return
        turns = self._won[ask.request_id] = Turns()
        try:
            self._pump()
            yield turns
        finally:
            del self._won[ask.request_id]
            self._receiver.ended(ask.request_id)
            self._pump()

    @asynccontextmanager
    async def sending(self, request_id: str, *, starving: bool) -> AsyncIterator[bool]:
        """Hold the sending slot as long as the context lasts. Gives False if it is taken and the request is not starving."""
        if self._sender.is_sending(request_id):
            yield False
            return
        go = self._sender.start(request_id, starving=starving)
        if go is Go.BUSY:
            yield False
            return
        try:
            if go is Go.WAIT:
                self._waiting[request_id] = asyncio.get_running_loop().create_future()
                await self._waiting[request_id]
            yield True
        finally:
            self._waiting.pop(request_id, None)
            self._sender.ended(request_id)
            self._pump()

    def sender_busy(self, ask: Ask) -> None:
        """Handle a busy sender: try other requests first, and this one again later."""
        self._receiver.sender_busy(ask.request_id)
        self._pump()
        if self._again is None:
            self._again = asyncio.get_running_loop().call_later(ROUND_S, self._next_round)

    def started(self, ask: Ask) -> None:
        self._receiver.started(ask.request_id)
        self._pump()

    def _next_round(self) -> None:
        self._again = None
        self._receiver.look_again()
        self._pump()

    def _pump(self) -> None:
        """Start all transfers that can start."""
        while (request_id := self._sender.next()) is not None:
            if not (waiting := self._waiting[request_id]).done():  # otherwise it was cancelled and is being removed
                waiting.set_result(None)
        while (turn := self._receiver.next()) is not None:
            self._won[turn.ask.request_id].put_nowait(turn.starving)

    def _unfit(self, load: Load, model_digest: str, *, draining: bool) -> RefusalReason | None:
        if not isinstance(self._engine, KvTransferring):
            return RefusalReason.CANNOT_RECEIVE
        if model_digest != self._engine.info.model_digest:
            return RefusalReason.OTHER_MODEL
        if draining:
            return RefusalReason.DRAINING
        full = load.requests + len(self._won) >= self._max_running
        return RefusalReason.BATCH_FULL if full else None

    def _idle_tokens(self, load: Load) -> int:
        return load.free_kv_blocks * self._engine.info.kv_block_tokens

    def _refuse(self, reason: RefusalReason) -> None:
        self._refusals.add(1, self._labels | {"penstock.reason": reason.value})
