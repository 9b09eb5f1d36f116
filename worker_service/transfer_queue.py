"""Carries out bid-ask at one instance: bids, queues what it won, and lets one transfer out at a time.

The rules are `services.domain.stages.bidding`; here they meet the event loop. A request stays in the queue as long as the
agent's call lasts, so an agent that dies leaves nothing behind.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from opentelemetry.metrics import Meter

from services.domain.instances import Load
from services.domain.stages.bidding import Ask, Bid, Go, Receiver, RefusalReason, Sender, TransferSlots

ROUND_S = 0.02  # requests whose senders were busy are tried again after so long
FIRST_TOKENS_PER_S = 100_000.0  # until a transfer has been measured; only the order of bids depends on it
SMOOTHING = 0.3


class Won:
    """A request in the receiver's queue."""

    def __init__(self, transfers: "TransferQueue", ask: Ask) -> None:
        self._transfers, self._ask = transfers, ask
        self._turns: asyncio.Queue[bool] = asyncio.Queue()
        self._turn_at: float | None = None
        self.measured_from: float | None = None
        """When the transfer began; None where it has not, or waited for its sender first."""

    async def turn(self) -> bool:
        """Wait until the transfer should start; whether the request is starving."""
        return await self._turns.get()

    def give_turn(self, starving: bool) -> None:
        self._turn_at = None if starving else asyncio.get_running_loop().time()
        self._turns.put_nowait(starving)

    def sender_busy(self) -> None:
        self._transfers.sender_busy(self._ask)

    def started(self) -> None:
        self._transfers.started(self._ask)
        self.measured_from = self._turn_at


class TransferQueue:
    """Both sides of one instance. `load` tells its load; `max_running` bounds the requests that it computes together."""

    def __init__(
        self,
        instance_id: str,
        slots: TransferSlots,
        sender: Sender,
        load: Callable[[], Load],
        meter: Meter,
        *,
        model_digest: str,
        kv_block_tokens: int,
        max_running: int,
        can_receive: bool,
        tier: str,
    ) -> None:
        self._receiver, self._sender, self._slots = Receiver(instance_id, slots), sender, slots
        self._load, self._digest, self._block_tokens = load, model_digest, kv_block_tokens
        self._max_running, self._can_receive = max_running, can_receive
        self._won: dict[str, Won] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}  # starving, here as the sender
        self._tokens_per_s = FIRST_TOKENS_PER_S
        self._measured = False
        self._again: asyncio.TimerHandle | None = None
        self._labels = {"penstock.tier": tier}
        self._bids = meter.create_counter("penstock.worker.bids", unit="{bid}", description="Bids made.")
        self._refusals = meter.create_counter(
            "penstock.worker.bid_refusals", unit="{refusal}", description="Asks and confirmations refused, by reason."
        )

    def bid(self, ask: Ask, model_digest: str, *, draining: bool) -> Bid | RefusalReason:
        """What this instance offers for a request, or why it will not have it."""
        load = self._load()
        unfit = self._unfit(load, model_digest, draining=draining)
        found = unfit or self._receiver.bid(
            ask, load_tokens=load.tokens, idle_tokens=self._idle_tokens(load), tokens_per_s=self._tokens_per_s
        )
        if isinstance(found, RefusalReason):
            self._refuse(found)
        else:
            self._bids.add(1, self._labels)
        return found

    @contextmanager
    def won(self, ask: Ask, model_digest: str, *, draining: bool) -> Iterator[Won | RefusalReason]:
        """This instance was chosen: the request is in the queue as long as the context lasts, or refused after all."""
        load = self._load()
        reason = self._unfit(load, model_digest, draining=draining) or self._receiver.confirm(
            ask, idle_tokens=self._idle_tokens(load)
        )
        if reason is not None:
            self._refuse(reason)
            yield reason
            return
        won = self._won[ask.request_id] = Won(self, ask)
        try:
            self._pump()
            yield won
        finally:
            del self._won[ask.request_id]
            self._receiver.ended(ask.request_id)
            if won.measured_from is not None:
                self._measure(ask.tokens, asyncio.get_running_loop().time() - won.measured_from)
            self._pump()

    @asynccontextmanager
    async def sending(self, request_id: str, *, starving: bool) -> AsyncIterator[bool]:
        """A transfer out, as long as the context lasts; False if another one is under way and this one is not starving."""
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
        """The turn came to nothing: others first, this one again in a moment."""
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
        """Start all that may start now."""
        while (request_id := self._sender.next()) is not None:
            if not (waiting := self._waiting[request_id]).done():  # else it was cancelled and leaves in a moment
                waiting.set_result(None)
        while (turn := self._receiver.next()) is not None:
            self._won[turn.ask.request_id].give_turn(turn.starving)

    def _unfit(self, load: Load, model_digest: str, *, draining: bool) -> RefusalReason | None:
        if not self._can_receive:
            return RefusalReason.CANNOT_RECEIVE
        if model_digest != self._digest:
            return RefusalReason.OTHER_MODEL
        if draining:
            return RefusalReason.DRAINING
        full = load.requests + len(self._won) >= self._max_running
        return RefusalReason.BATCH_FULL if full else None

    def _idle_tokens(self, load: Load) -> int:
        return load.free_kv_blocks * self._block_tokens

    def _refuse(self, reason: RefusalReason) -> None:
        self._refusals.add(1, self._labels | {"penstock.reason": reason.value})

    def _measure(self, tokens: int, seconds: float) -> None:
        """Smooth the transfers' throughput; the first measurement replaces what was assumed."""
        rate = tokens / max(seconds, 1e-6)
        self._tokens_per_s += (SMOOTHING if self._measured else 1.0) * (rate - self._tokens_per_s)
        self._measured = True
