"""Laws of the ways on which a move ends early: no slot, claim or turn is lost, and what is out of order is refused."""

import pytest

from penstock.services.domain.stages.bidding import (
    STARVED_AFTER,
    Ask,
    Bid,
    Go,
    Receiver,
    RefusalReason,
    Sender,
    TransferSlots,
    shortlist,
)
from tests.support.present import present


def ask(name: str, tokens: int = 10, sender_tokens: int = 10) -> Ask:
    return Ask(name, "s", tokens, sender_tokens)


def receiver_of(*asks: Ask, slots: TransferSlots | None = None) -> Receiver:
    receiver = Receiver("r", slots or TransferSlots())
    for one in asks:
        assert receiver.confirm(one, idle_tokens=10_000) is None
    return receiver


def test_slots_are_counted_exactly() -> None:
    slots = TransferSlots(2)
    with pytest.raises(ValueError, match="no transfer slot is taken"):
        slots.give_back()
    slots.take()
    assert slots.free == 1
    slots.take()
    assert slots.free == 0
    with pytest.raises(ValueError, match="all 2 transfer slots are taken"):
        slots.take()
    assert slots.used == 2
    slots.claims = 1
    assert slots.free == 0  # not negative
    slots.give_back()
    assert slots.free == 0  # the claim has it
    slots.claims = 0
    assert slots.free == 1
    slots.give_back()
    assert (slots.used, slots.free) == (0, 2)


def test_ties_are_broken_by_the_name_of_the_receiver() -> None:
    """Whatever the order of arrival, all routers choose the same half and the same three."""
    bids = [Bid(name, 5, 1.0) for name in "hgfedcba"]
    assert {b.receiver_id for b in shortlist(bids)} == {"a", "b", "c"}
    assert {b.receiver_id for b in shortlist(bids[::-1])} == {"a", "b", "c"}
    equal_start = [Bid("a", 3, 1.0), Bid("b", 2, 1.0), Bid("c", 1, 1.0), Bid("d", 4, 1.0)]
    padding = [Bid(name, 99, 0.0) for name in "wxyz"]
    assert {b.receiver_id for b in shortlist([*equal_start, *padding])} == {"a", "b", "c"}
    assert [b.receiver_id for b in shortlist([Bid("b", 1, 0.0), Bid("a", 1, 0.0), Bid("c", 1, 0.0)])] == ["b", "a"]


def test_a_request_fits_if_it_leaves_a_token_idle() -> None:
    receiver = receiver_of()
    assert receiver.can_take(ask("a", tokens=9), 10) is None
    assert receiver.can_take(ask("a", tokens=10), 10) is RefusalReason.NO_IDLE_KV
    assert receiver.confirm(ask("a", tokens=10), idle_tokens=10) is RefusalReason.NO_IDLE_KV
    assert "a" not in receiver
    assert receiver.confirm(ask("a", tokens=9), idle_tokens=10) is None
    assert ("a" in receiver, receiver.buffered_tokens) == (True, 9)
    assert receiver.confirm(ask("a", tokens=1), idle_tokens=640) is RefusalReason.KNOWN_ALREADY
    crowded = receiver.bid(ask("b", tokens=1), load_tokens=0, idle_tokens=10, tokens_per_s=10.0)
    assert crowded is RefusalReason.NO_IDLE_KV, "what was won has its room set aside"


@pytest.mark.parametrize("ending", ["never started", "refused", "moved"])
def test_every_end_of_a_won_request_frees_what_it_held(ending: str) -> None:
    """Its slot, if it had a turn, and its room; a second end does nothing."""
    slots = TransferSlots(2)
    receiver = receiver_of(ask("a"), slots=slots)
    if ending != "never started":
        assert receiver.next() is not None
        assert slots.used == 1
        if ending == "moved":
            receiver.started("a")
            assert slots.used == 1
    assert receiver.ended("a")
    assert (slots.used, receiver.buffered_tokens, "a" in receiver) == (0, 0, False)
    assert not receiver.ended("a")
    assert slots.used == 0


def test_equal_senders_are_served_in_order_of_their_wins() -> None:
    slots = TransferSlots(3)
    receiver = receiver_of(ask("first"), ask("second"), ask("third"), slots=slots)
    turns = [receiver.next() for _ in range(3)]
    assert [turn.ask.request_id for turn in turns if turn is not None] == ["first", "second", "third"]
    assert receiver.next() is None  # no slot


def test_only_earlier_requests_have_been_skipped() -> None:
    """One that starts skips those that were won before it and still wait; nobody is skipped by an older one."""
    receiver = receiver_of(ask("old"), ask("busy", sender_tokens=99), ask("young"), slots=TransferSlots(9))
    for i in range(STARVED_AFTER):
        turn = present(receiver.next())
        assert turn.ask.request_id == ("busy" if not i else f"busy{i}")
        receiver.started(turn.ask.request_id)
        assert receiver.confirm(ask(f"busy{i + 1}", sender_tokens=99), idle_tokens=10_000) is None
    turn = present(receiver.next())
    assert (turn.ask.request_id, turn.starving) == ("old", True)
    receiver.started("old")
    turn = present(receiver.next())
    assert not turn.starving or turn.ask.request_id == "young"


def test_nothing_starts_before_a_starving_turn() -> None:
    """The sender must send it next; the receiver keeps a slot for it."""
    slots = TransferSlots(3)
    receiver = receiver_of(ask("a"), slots=slots)
    for _ in range(STARVED_AFTER):
        receiver.look_again()
        assert not present(receiver.next()).starving
        receiver.sender_busy("a")
    assert receiver.confirm(ask("b", sender_tokens=99), idle_tokens=10_000) is None
    turn = present(receiver.next())  # in the same round: a starving request does not wait for the next one
    assert (turn.ask.request_id, turn.starving) == ("a", True)
    assert receiver.next() is None
    receiver.started("a")
    turn = present(receiver.next())
    assert turn.ask.request_id == "b"


def test_several_starving_requests_are_served_in_order() -> None:
    receiver = receiver_of(ask("a"), ask("b", sender_tokens=99), slots=TransferSlots(3))
    for _ in range(STARVED_AFTER):
        receiver.look_again()
        for turn in (receiver.next(), receiver.next()):
            assert turn is not None
        for name in "ab":
            receiver.sender_busy(name)
    turn = present(receiver.next())
    assert turn.ask.request_id == "a"


@pytest.mark.parametrize("call", ["sender_busy", "started"])
def test_what_has_no_turn_cannot_start_or_fail(call: str) -> None:
    slots = TransferSlots()
    receiver = receiver_of(ask("a"), slots=slots)
    with pytest.raises(ValueError, match="a is queued, not turn"):
        getattr(receiver, call)("a")
    with pytest.raises(ValueError, match="b is unknown, not turn"):
        getattr(receiver, call)("b")
    receiver.next()
    receiver.started("a")
    with pytest.raises(ValueError, match="a is moving, not turn"):
        getattr(receiver, call)("a")
    assert slots.used == 1


def test_a_sender_transmits_one_request_at_a_time() -> None:
    slots = TransferSlots(3)
    sender = Sender(slots)
    for name in "abc":
        sender.offer(name, 10)
    sender.offer("a", 15)
    assert (sender.tokens, "a" in sender) == (35, True)
    assert sender.start("a") is Go.NOW
    assert (sender.transmitting, slots.used) == ("a", 1)
    assert sender.start("b") is Go.BUSY
    assert slots.claims == 0
    assert sender.start("c", starving=True) is Go.WAIT
    assert (slots.used, slots.claims) == (1, 1)
    assert sender.is_sending("a")
    assert sender.is_sending("c")
    assert not sender.is_sending("b")
    for name in "ac":
        with pytest.raises(ValueError, match="already being sent"):
            sender.start(name)
    assert sender.next() is None
    sender.ended("a")
    assert (slots.used, sender.tokens) == (0, 20)
    assert sender.start("b") is Go.BUSY  # the starving one is next
    assert sender.next() == "c"
    assert (sender.transmitting, slots.used, slots.claims) == ("c", 1, 0)
    sender.ended("c")
    assert (sender.transmitting, slots.used, sender.tokens) == (None, 0, 10)
    assert sender.next() is None


def test_a_starving_request_that_ends_gives_its_claim_back() -> None:
    """And the one behind it is served; ends of others change nothing."""
    slots = TransferSlots(2)
    sender = Sender(slots)
    slots.take()
    slots.take()  # two transfers come in
    assert sender.start("a", starving=True) is Go.WAIT
    assert sender.start("b", starving=True) is Go.WAIT
    assert slots.claims == 2
    assert sender.next() is None  # no slot
    sender.ended("unknown")
    assert slots.claims == 2
    sender.ended("a")
    assert slots.claims == 1
    assert not sender.is_sending("a")
    slots.give_back()
    assert sender.next() == "b"
    assert (slots.used, slots.claims) == (2, 0)


def test_a_sender_without_a_slot_is_busy() -> None:
    slots = TransferSlots(2)
    sender = Sender(slots)
    slots.take()
    slots.take()
    assert sender.start("a") is Go.BUSY
    assert sender.transmitting is None
    slots.give_back()
    assert sender.start("a") is Go.NOW
    assert slots.used == 2


def test_a_bid_includes_what_was_just_won_in_its_load_and_its_start() -> None:
    """Otherwise every request of a burst goes to the receiver that was the least loaded before it."""
    receiver = receiver_of(ask("a", tokens=30), ask("b", tokens=20))
    bid = receiver.bid(ask("c"), load_tokens=7, idle_tokens=100, tokens_per_s=10.0)
    assert bid == Bid("r", 57, 5.0)
