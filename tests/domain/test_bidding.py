"""Bid-ask: a request is on one instance, always; nobody waits for ever; who is passed over too often goes next."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.services.domain.stages.bidding import (
    MAX_TRANSFERS,
    STARVED_AFTER,
    Ask,
    Bid,
    Go,
    Receiver,
    Sender,
    TransferSlots,
    Turn,
    choose,
    shortlist,
)
from tests.support.present import present

BIDS = st.lists(
    st.builds(Bid, st.uuids().map(str), st.integers(0, 5), st.integers(0, 5).map(float)),
    unique_by=lambda b: b.receiver_id,
    max_size=12,
)


def ask(name: str, sender: str = "s", tokens: int = 10, sender_tokens: int = 10) -> Ask:
    return Ask(name, sender, tokens, sender_tokens)


@given(BIDS)
def test_the_shortlist_is_the_calmer_half_and_of_it_the_three_earliest(bids: list[Bid]) -> None:
    kept = shortlist(bids)
    dropped = [b for b in bids if b not in kept]
    assert len(kept) == min(3, (len(bids) + 1) // 2)
    assert kept == [b for b in bids if b in kept], "in the order of arrival"
    for out, in_ in itertools.product(dropped, kept):
        busier = sum(1 for b in bids if b.load_tokens < out.load_tokens) >= len(kept)
        assert busier or out.load_tokens >= in_.load_tokens or out.earliest_start_s >= in_.earliest_start_s
    assert choose(bids) == (kept[0] if kept else None), "the first to have replied wins"


def test_the_busiest_sender_is_served_first_and_a_sender_that_transmits_is_skipped() -> None:
    receiver = Receiver("r", TransferSlots())
    for name, load in (("calm", 10), ("busy", 90), ("middle", 50)):
        receiver.confirm(ask(name, sender=name, sender_tokens=load), idle_tokens=1000)
    first = present(receiver.next())
    assert first.ask.request_id == "busy"
    receiver.sender_busy("busy")
    second = present(receiver.next())
    assert second.ask.request_id == "middle", "the skipped one waits for the next round"
    third = present(receiver.next())
    assert third.ask.request_id == "calm"
    assert receiver.next() is None
    receiver.look_again()
    again = present(receiver.next())
    assert again.ask.request_id == "busy"


def test_a_slot_that_a_starving_request_waits_for_goes_to_nobody_else() -> None:
    slots = TransferSlots(2)
    sender, receiver = Sender(slots), Receiver("here", slots)
    for name in ("in-1", "in-2", "in-3"):
        receiver.confirm(ask(name), idle_tokens=1000)
    assert receiver.next() is not None
    assert receiver.next() is not None
    assert sender.start("out") is Go.BUSY, "three transfers at most, whatever their direction"
    assert sender.start("out", starving=True) is Go.WAIT
    receiver.started("in-1")
    receiver.ended("in-1")
    assert receiver.next() is None, "the slot is spoken for"
    assert sender.next() == "out"


def test_only_who_was_won_earlier_is_passed_over_by_a_transfer() -> None:
    receiver = Receiver("here", TransferSlots(8), starved_after=1)
    receiver.confirm(ask("early", sender_tokens=10), idle_tokens=1000)
    receiver.confirm(ask("first", sender_tokens=90), idle_tokens=1000)
    receiver.confirm(ask("late", sender_tokens=10), idle_tokens=1000)
    assert present(receiver.next()).ask.request_id == "first"
    receiver.started("first")
    assert (turn := present(receiver.next())).starving
    assert turn.ask.request_id == "early"
    receiver.ended("early")
    assert not present(receiver.next()).starving


class Cluster(RuleBasedStateMachine):
    """Instances, their requests, and agents whose messages arrive late, in any order, or never (a request ends)."""

    def __init__(self) -> None:
        super().__init__()
        self.where: dict[str, set[str]] = {}  # request -> instances that run it
        self.to: dict[str, str] = {}  # request under way -> receiver that won it
        self.turns: dict[str, Turn] = {}  # told by a receiver, not yet heard by the sender
        self.waiting: set[str] = set()  # starving, at the sender
        self.sending: set[str] = set()
        self.starts: list[tuple[str, str]] = []  # (receiver, request), in order
        self.won_at: dict[str, int] = {}  # request -> length of `starts` when it was confirmed
        self.names = itertools.count()

    @initialize(count=st.integers(2, 4))
    def build(self, count: int) -> None:
        self.slots = {f"i{i}": TransferSlots() for i in range(count)}
        self.senders = {i: Sender(s) for i, s in self.slots.items()}
        self.receivers = {i: Receiver(i, s) for i, s in self.slots.items()}

    @rule(data=st.data(), tokens=st.integers(1, 50))
    def arrive_and_be_offered(self, data: st.DataObject, tokens: int) -> None:
        source, name = data.draw(st.sampled_from(sorted(self.slots))), f"r{next(self.names)}"
        self.where[name] = {source}
        self.senders[source].offer(name, tokens)
        self._ask(name, source, tokens, data)

    @precondition(lambda self: self.resting())
    @rule(data=st.data(), tokens=st.integers(1, 50))
    def offer_again(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(self.resting()))
        (source,) = self.where[name]
        self.senders[source].offer(name, tokens)
        self._ask(name, source, tokens, data)

    def _ask(self, name: str, source: str, tokens: int, data: st.DataObject) -> None:
        asked = Ask(name, source, tokens, self.senders[source].tokens)
        answers = [
            self.receivers[i].bid(asked, load_tokens=0, idle_tokens=200, tokens_per_s=100.0)
            for i in data.draw(st.permutations(sorted(self.slots)))
            if i != source
        ]
        best = choose([a for a in answers if isinstance(a, Bid)])
        if best is None or self.receivers[best.receiver_id].confirm(asked, idle_tokens=200) is not None:
            self.senders[source].ended(name)
            return
        self.to[name] = best.receiver_id
        self.won_at[name] = len(self.starts)

    @rule(data=st.data(), again=st.booleans())
    def take_a_turn(self, data: st.DataObject, again: bool) -> None:
        receiver = self.receivers[data.draw(st.sampled_from(sorted(self.slots)))]
        if again:
            receiver.look_again()
        if (turn := receiver.next()) is not None:
            self.turns[turn.ask.request_id] = turn

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def the_sender_hears(self, data: st.DataObject) -> None:
        self._hear(data.draw(st.sampled_from(sorted(self.turns))))

    def _hear(self, name: str) -> None:
        turn = self.turns.pop(name)
        match self.senders[turn.ask.sender_id].start(name, starving=turn.starving):
            case Go.NOW:
                self._started(name)
            case Go.BUSY:
                assert not turn.starving, "a starving request is never sent away"
                self.receivers[self.to[name]].sender_busy(name)
            case Go.WAIT:
                self.waiting.add(name)

    def _started(self, name: str) -> None:
        receiver = self.to[name]
        self.receivers[receiver].started(name)
        self.sending.add(name)
        self.waiting.discard(name)
        later = [r for i, r in self.starts[self.won_at[name] :] if i == receiver and self.won_at[r] > self.won_at[name]]
        assert len(later) <= STARVED_AFTER + MAX_TRANSFERS - 1, "passed over more often than the bound allows"
        self.starts.append((receiver, name))

    @precondition(lambda self: self.sending)
    @rule(data=st.data(), arrived=st.booleans())
    def end_a_transfer(self, data: st.DataObject, arrived: bool) -> None:
        self._end_transfer(data.draw(st.sampled_from(sorted(self.sending))), arrived)

    def _end_transfer(self, name: str, arrived: bool) -> None:
        (source,), target = self.where[name], self.to.pop(name)
        self.sending.remove(name)
        if arrived:
            self.where[name] = {target}
        self._forget(name, source, target)

    def _forget(self, name: str, source: str, target: str) -> None:
        self.senders[source].ended(name)
        self.receivers[target].ended(name)
        for instance in (source, target):
            self._send_next(instance)

    def _send_next(self, instance: str) -> None:
        if (name := self.senders[instance].next()) is not None:
            self._started(name)

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def a_request_ends(self, data: st.DataObject) -> None:
        """Finished or aborted, wherever it is in the protocol."""
        name = data.draw(st.sampled_from(sorted(self.where)))
        (source,) = self.where.pop(name)
        self.turns.pop(name, None)
        self.waiting.discard(name)
        self.sending.discard(name)
        if (target := self.to.pop(name, None)) is not None:
            self._forget(name, source, target)

    def resting(self) -> list[str]:
        return sorted(set(self.where) - set(self.to))

    @invariant()
    def every_request_is_on_one_instance(self) -> None:
        assert all(len(on) == 1 for on in self.where.values())

    @invariant()
    def slots_are_what_moves(self) -> None:
        for name, slots in getattr(self, "slots", {}).items():
            incoming = [r for r, to in self.to.items() if to == name]
            turned = sum(1 for r in incoming if r in self.turns or r in self.sending or r in self.waiting)
            outgoing = sum(1 for r in self.sending if self.where[r] == {name})
            assert slots.used == turned + outgoing <= MAX_TRANSFERS
            assert sum(1 for r in self.sending if self.where[r] == {name}) <= 1, "one transmission per sender"

    def teardown(self) -> None:
        """Left alone, with every message arriving, everything that was won moves: no deadlock."""
        for _ in range(20 * (1 + len(self.to))):
            for receiver in getattr(self, "receivers", {}).values():
                receiver.look_again()
                while (turn := receiver.next()) is not None:
                    self.turns[turn.ask.request_id] = turn
            for name in sorted(self.turns):
                self._hear(name)
            for name in sorted(self.sending):
                self._end_transfer(name, arrived=True)
            if not self.to:
                break
        assert not self.to, f"still waiting: {self.to}"
        for slots in getattr(self, "slots", {}).values():
            assert (slots.used, slots.claims) == (0, 0)


Cluster.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCluster = Cluster.TestCase
