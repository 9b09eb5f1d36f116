"""Bid-ask: the choice of the instance and the time for moving a request (CascadeInfer, section 4.4). No I/O.

Ask: the sender's agent offers one request to all candidates. Bid: each replies with its load and the earliest time at which
the transfer could start, or refuses. Choice: the busier half is dropped, the three earliest are kept, and the first of these
that replied wins. Confirmation: the winner queues the request, ordered by the sender's load. It starts transfers in turns and
skips senders that are busy, until a request has been skipped too often: then its sender must send it next, and the receiver
starts nothing else before it.

`Receiver` and `Sender` are the two sides of one instance; they share its `TransferSlots`. A request stays where it runs until
its transfer has succeeded, so any failure, refusal or withdrawal leaves it there.

There is no deadlock: a started transfer needs no further resources. Only a starving turn waits, and a receiver has at most
one; so one of the two or more slots of an instance always becomes free, and a sender serves its starving requests in order of
arrival.
"""

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass

MAX_TRANSFERS = 3  # at once per instance, in and out together (section 5); the default of `stages.max_transfers`
KEPT_BIDS = 3
STARVED_AFTER = 3  # times that a request is skipped; the paper does not give its threshold


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that should move.

    tokens: its length, prompt and output so far. sender_tokens: total length of the requests that the sender still has to
    hand over.
    """

    request_id: str
    sender_id: str
    tokens: int
    sender_tokens: int


@dataclass(frozen=True, slots=True)
class Bid:
    """A bid. load_tokens: of all running and queued sequences of the receiver, and of those that it has won and that have not
    arrived. earliest_start_s: from now."""

    receiver_id: str
    load_tokens: int
    earliest_start_s: float


class RefusalReason(enum.Enum):
    """Why an instance refuses a request."""

    NO_IDLE_KV = "no_idle_kv"
    DRAINING = "draining"
    OTHER_MODEL = "other_model"
    KNOWN_ALREADY = "known_already"
    CANNOT_RECEIVE = "cannot_receive"
    BATCH_FULL = "batch_full"


def shortlist(bids: Seq[Bid]) -> list[Bid]:
    """The bids that can win, in the given order: the three earliest starts of the less loaded half.

    The half includes the middle of an odd number. Ties are broken by receiver id.
    """
    calm = sorted(bids, key=lambda b: (b.load_tokens, b.receiver_id))[: (len(bids) + 1) // 2]
    early = sorted(calm, key=lambda b: (b.earliest_start_s, b.load_tokens, b.receiver_id))[:KEPT_BIDS]
    receiver_ids = {b.receiver_id for b in early}
    return [b for b in bids if b.receiver_id in receiver_ids]


def choose(bids: Seq[Bid]) -> Bid | None:
    """The winner of `bids`, which are in order of arrival; None without bids."""
    return next(iter(shortlist(bids)), None)


class TransferSlots:
    """Limits the concurrent transfers of one instance, in and out together, to `most`: at least two, as one may be waiting.

    claims: slots reserved for starving requests.
    """

    def __init__(self, most: int = MAX_TRANSFERS) -> None:
        self.most, self.used, self.claims = most, 0, 0

    @property
    def free(self) -> int:
        return max(0, self.most - self.used - self.claims)

    def take(self) -> None:
        if self.used >= self.most:
            raise ValueError(f"all {self.most} transfer slots are taken")
        self.used += 1

    def give_back(self) -> None:
        if self.used < 1:
            raise ValueError("no transfer slot is taken")
        self.used -= 1


class _Phase(enum.Enum):
    QUEUED = "queued"
    TURN = "turn"  # asked to start; no response yet
    MOVING = "moving"


@dataclass(slots=True)
class _Won:
    """A request that this receiver has won. passed: how often it was skipped."""

    ask: Ask
    order: int
    phase: _Phase = _Phase.QUEUED
    passed: int = 0
    tried: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """A transfer to start now. starving: the sender must send it next; otherwise it may reply that it is busy."""

    ask: Ask
    starving: bool


class Receiver:
    """The receiving side of one instance: its bids and the queue of requests that it has won."""

    def __init__(self, receiver_id: str, slots: TransferSlots, *, starved_after: int = STARVED_AFTER) -> None:
        self._id, self._slots, self._starved_after = receiver_id, slots, starved_after
        self._won: dict[str, _Won] = {}
        self._orders = 0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._won

    @property
    def buffered_tokens(self) -> int:
        """Total length of the requests won and not yet received."""
        return sum(w.ask.tokens for w in self._won.values())

    def bid(self, ask: Ask, *, load_tokens: int, idle_tokens: int, tokens_per_s: float) -> Bid | RefusalReason:
        """This instance's bid.

        load_tokens: of its running and queued sequences, without those that it has won. idle_tokens: capacity of its idle KV
        blocks. tokens_per_s: measured throughput of transfers.
        """
        if (reason := self.can_take(ask, idle_tokens)) is not None:
            return reason
        return Bid(self._id, load_tokens + self.buffered_tokens, self.buffered_tokens / tokens_per_s)

    def can_take(self, ask: Ask, idle_tokens: int) -> RefusalReason | None:
        """Why the request is refused; None if it fits into the idle KV, less the room reserved for requests already won."""
        if ask.request_id in self._won:
            return RefusalReason.KNOWN_ALREADY
        return None if ask.tokens < idle_tokens - self.buffered_tokens else RefusalReason.NO_IDLE_KV

    def confirm(self, ask: Ask, *, idle_tokens: int) -> RefusalReason | None:
        """Queue a request after this instance was chosen, or return why it can no longer take it."""
        if (reason := self.can_take(ask, idle_tokens)) is not None:
            return reason
        self._won[ask.request_id] = _Won(ask, self._orders)
        self._orders += 1
        return None

    def next(self) -> Turn | None:
        """The next transfer to start; it holds a slot from now on. None if none can start or all were tried in this round."""
        if not self._won or self._slots.free < 1:
            return None
        won = self._won.values()
        if any(w.phase is _Phase.TURN and w.passed >= self._starved_after for w in won):
            return None  # the starving turn goes first
        queued = [w for w in won if w.phase is _Phase.QUEUED]
        starving = [w for w in queued if w.passed >= self._starved_after]
        if starving:
            best = min(starving, key=lambda w: w.order)
        else:
            fresh = [w for w in queued if not w.tried]
            if not fresh:
                return None
            best = min(fresh, key=lambda w: (-w.ask.sender_tokens, w.order))
        self._slots.take()
        best.phase, best.tried = _Phase.TURN, True
        return Turn(best.ask, best.passed >= self._starved_after)

    def sender_busy(self, request_id: str) -> None:
        """Handle a turn that failed because the sender is transmitting another request."""
        won = self._in(request_id, _Phase.TURN)
        won.phase = _Phase.QUEUED
        won.passed += 1
        self._slots.give_back()

    def look_again(self) -> None:
        """Start a new round, in which requests with busy senders are tried again."""
        for won in self._won.values():
            won.tried = False

    def started(self, request_id: str) -> None:
        """Handle the start of a transfer. Queued requests that were won earlier have been skipped."""
        moving = self._in(request_id, _Phase.TURN)
        moving.phase = _Phase.MOVING
        for won in self._won.values():
            if won.phase is _Phase.QUEUED and won.order < moving.order:
                won.passed += 1

    def ended(self, request_id: str) -> bool:
        """Remove a request, moved or not; False if it is unknown."""
        won = self._won.pop(request_id, None)
        if won is not None and won.phase is not _Phase.QUEUED:
            self._slots.give_back()
        return won is not None

    def _in(self, request_id: str, phase: _Phase) -> _Won:
        won = self._won.get(request_id)
        if won is None or won.phase is not phase:
            raise ValueError(f"{request_id} is {won.phase.value if won is not None else 'unknown'}, not {phase.value}")
        return won


class Go(enum.Enum):
    """A sender's response to a receiver's turn."""

    NOW = "now"  # it has a slot and transmits
    BUSY = "busy"  # another request is being sent: skip this one
    WAIT = "wait"  # starving: it is sent as soon as the current transmission has ended


class Sender:
    """The sending side of one instance: the requests to hand over, and the one that it is transmitting."""

    def __init__(self, slots: TransferSlots) -> None:
        self._slots = slots
        self._buffered: dict[str, int] = {}
        self._starving: list[str] = []
        self.transmitting: str | None = None

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._buffered

    @property
    def tokens(self) -> int:
        """Total length of the requests to hand over, which is this instance's priority with receivers."""
        return sum(self._buffered.values())

    def is_sending(self, request_id: str) -> bool:
        """Whether the request is being sent or is waiting for it."""
        return request_id == self.transmitting or request_id in self._starving

    def offer(self, request_id: str, tokens: int) -> None:
        """Add a request to hand over, or update its length."""
        self._buffered[request_id] = tokens

    def start(self, request_id: str, *, starving: bool = False) -> Go:
        """Respond to a receiver that wants the request now.

        Raises:
            ValueError: The request is already being sent or waiting.
        """
        if self.is_sending(request_id):
            raise ValueError(f"{request_id} is already being sent")
        if self.transmitting is None and not self._starving and self._slots.free > 0:
            self._slots.take()
            self.transmitting = request_id
            return Go.NOW
        if not starving:
            return Go.BUSY
        self._starving.append(request_id)
        self._slots.claims += 1
        return Go.WAIT

    def next(self) -> str | None:
        """The starving request to send now. Call this whenever a transfer of this instance, in or out, has ended."""
        if self.transmitting is not None or not self._starving or self._slots.used >= self._slots.most:
            return None
        self.transmitting = self._starving.pop(0)
        self._slots.claims -= 1
        self._slots.take()
        return self.transmitting

    def ended(self, request_id: str) -> None:
        """Remove a request that has moved, has finished or stays."""
        self._buffered.pop(request_id, None)
        if request_id in self._starving:
            self._starving.remove(request_id)
            self._slots.claims -= 1
        if request_id == self.transmitting:
            self.transmitting = None
            self._slots.give_back()
