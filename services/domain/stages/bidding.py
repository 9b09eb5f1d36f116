"""Bid-ask: which instance takes a request that should move, and when it goes (CascadeInfer, section 4.4). No I/O.

Asking: the sender's agent names one request to all candidates. Bidding: each says its load and the earliest time at which
the transfer could start, or why it will not have it. Choice: the busier half is dropped, the three earliest are kept, the
first to have replied wins. Confirmation: the winner puts the request in its queue, ordered by the sender's load. Turn by
turn it starts transfers; a sender that transmits already is skipped, until a request has been passed over too often: then
its sender sends it next, and the receiver starts nothing else before.

`Receiver` and `Sender` are the two sides of one instance; they share its `TransferSlots`. A request stays where it runs
until its transfer has succeeded, so every failure, refusal or withdrawal leaves it there.

Why nobody waits for ever: a transfer that has started needs nothing more. Only a starving turn waits, and a receiver has
one at most; so of the two or more slots of an instance one is always free in the end, and a sender serves its starving
requests first come, first served.
"""

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass

MAX_TRANSFERS = 3  # at once per instance, in and out together (section 5); the default of `stages.max_transfers`
KEPT_BIDS = 3
STARVED_AFTER = 3  # times passed over; the paper has a threshold and does not name it


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that should move.

    tokens: its length, prompt and output so far. sender_tokens: length of all that the sender still has to hand over.
    """

    request_id: str
    sender_id: str
    tokens: int
    sender_tokens: int


@dataclass(frozen=True, slots=True)
class Bid:
    """load_tokens: of all sequences running and queued there. earliest_start_s: from now."""

    receiver_id: str
    load_tokens: int
    earliest_start_s: float


class RefusalReason(enum.Enum):
    """Why an instance will not have a request."""

    NO_IDLE_KV = "no_idle_kv"
    DRAINING = "draining"
    OTHER_MODEL = "other_model"
    KNOWN_ALREADY = "known_already"
    CANNOT_RECEIVE = "cannot_receive"
    BATCH_FULL = "batch_full"


def shortlist(bids: Seq[Bid]) -> list[Bid]:
    """The bids that can win, in the order given: without the busier half, the three earliest starts of the rest.

    Of an odd number the one in the middle stays; ties fall by receiver id.
    """
    calm = sorted(bids, key=lambda b: (b.load_tokens, b.receiver_id))[: (len(bids) + 1) // 2]
    early = sorted(calm, key=lambda b: (b.earliest_start_s, b.load_tokens, b.receiver_id))[:KEPT_BIDS]
    kept = {b.receiver_id for b in early}
    return [b for b in bids if b.receiver_id in kept]


def choose(bids: Seq[Bid]) -> Bid | None:
    """The winner of `bids`, which are in the order in which they came; None without any."""
    return next(iter(shortlist(bids)), None)


class TransferSlots:
    """Transfers of one instance, in and out together: at most `most` at once.

    claims: slots that starving requests wait for; nobody else gets those.
    """

    def __init__(self, most: int = MAX_TRANSFERS) -> None:
        if most < 2:
            raise ValueError(f"an instance needs two transfer slots or more, not {most}: one may have to wait")
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
    TURN = "turn"  # told to start; not heard of since
    MOVING = "moving"


@dataclass(slots=True)
class _Won:
    """A request that this receiver has won. passed: times it was passed over."""

    ask: Ask
    order: int
    phase: _Phase = _Phase.QUEUED
    passed: int = 0
    tried: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """Start this transfer now. starving: the sender sends it next, whatever else it has; else it may be busy."""

    ask: Ask
    starving: bool


class Receiver:
    """The receiving side of one instance: bids, and the queue of what it has won."""

    def __init__(self, receiver_id: str, slots: TransferSlots, *, starved_after: int = STARVED_AFTER) -> None:
        self._id, self._slots, self._starved_after = receiver_id, slots, starved_after
        self._won: dict[str, _Won] = {}
        self._orders = 0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._won

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._won)

    @property
    def buffered_tokens(self) -> int:
        """Length of all requests won and not yet received."""
        return sum(w.ask.tokens for w in self._won.values())

    def bid(self, ask: Ask, *, load_tokens: int, idle_tokens: int, tokens_per_s: float) -> Bid | RefusalReason:
        """What this instance offers. idle_tokens: room in its idle KV blocks. tokens_per_s: measured over transfers."""
        if (reason := self.can_take(ask, idle_tokens)) is not None:
            return reason
        return Bid(self._id, load_tokens, self.buffered_tokens / tokens_per_s)

    def can_take(self, ask: Ask, idle_tokens: int) -> RefusalReason | None:
        """Why not, if not: no idle KV, no move. What was won already has its room set aside."""
        if ask.request_id in self._won:
            return RefusalReason.KNOWN_ALREADY
        return None if ask.tokens < idle_tokens - self.buffered_tokens else RefusalReason.NO_IDLE_KV

    def confirm(self, ask: Ask, *, idle_tokens: int) -> RefusalReason | None:
        """This instance was chosen: queue the request; or say why no longer."""
        if (reason := self.can_take(ask, idle_tokens)) is not None:
            return reason
        self._won[ask.request_id] = _Won(ask, self._orders)
        self._orders += 1
        return None

    def next(self) -> Turn | None:
        """The transfer to start now: it has a slot from here on. None: nothing may start, or all were tried this round."""
        if self._slots.free < 1:
            return None
        won = self._won.values()
        if any(w.phase is _Phase.TURN and w.passed >= self._starved_after for w in won):
            return None  # it is waited for
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
        """The turn came to nothing: the sender transmits another request."""
        won = self._in(request_id, _Phase.TURN)
        won.phase = _Phase.QUEUED
        won.passed += 1
        self._slots.give_back()

    def look_again(self) -> None:
        """Begin a new round: requests whose senders were busy may be tried again."""
        for won in self._won.values():
            won.tried = False

    def started(self, request_id: str) -> None:
        """The sender transmits. Those that won before it and still wait have been passed over."""
        moving = self._in(request_id, _Phase.TURN)
        moving.phase = _Phase.MOVING
        for won in self._won.values():
            if won.phase is _Phase.QUEUED and won.order < moving.order:
                won.passed += 1

    def ended(self, request_id: str) -> bool:
        """Forget a request, moved or not; False if it is not known."""
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
    """A sender's answer to a receiver's turn."""

    NOW = "now"  # it has the slot and transmits
    BUSY = "busy"  # another request is being sent: skip this one
    WAIT = "wait"  # starving: it is sent as soon as the present transmission has ended


class Sender:
    """The sending side of one instance: what it wants to hand over, and the one request that it transmits."""

    def __init__(self, slots: TransferSlots) -> None:
        self._slots = slots
        self._buffered: dict[str, int] = {}
        self._starving: list[str] = []
        self.transmitting: str | None = None

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._buffered

    @property
    def tokens(self) -> int:
        """Length of all requests that this instance still has to hand over: its priority with receivers."""
        return sum(self._buffered.values())

    def is_sending(self, request_id: str) -> bool:
        """Whether it is being sent, or waits for that."""
        return request_id == self.transmitting or request_id in self._starving

    def offer(self, request_id: str, tokens: int) -> None:
        """The request should move; again with another length as it grows."""
        self._buffered[request_id] = tokens

    def start(self, request_id: str, *, starving: bool = False) -> Go:
        """A receiver wants the request now. ValueError if it is being sent, or waits, already."""
        if self.is_sending(request_id):
            raise ValueError(f"{request_id} is on its way already")
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
        """The starving request that goes now; to be asked whenever a transfer of this instance, in or out, has ended."""
        if self.transmitting is not None or not self._starving or self._slots.used >= self._slots.most:
            return None
        self.transmitting = self._starving.pop(0)
        self._slots.claims -= 1
        self._slots.take()
        return self.transmitting

    def ended(self, request_id: str) -> None:
        """Forget a request: moved, finished, or it stays."""
        self._buffered.pop(request_id, None)
        if request_id in self._starving:
            self._starving.remove(request_id)
            self._slots.claims -= 1
        if request_id == self.transmitting:
            self.transmitting = None
            self._slots.give_back()
