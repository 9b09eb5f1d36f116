"""The rules of admission, against a model that is too simple to be wrong."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router_service.admission.rules import INITIAL_HOLD_S, Admission, Ticket, TicketState


@dataclass
class _Expected:
    """What the model knows of one ticket."""

    priority: int
    arrival: int
    places: int


class AdmissionMachine(RuleBasedStateMachine):
    """Requests arrive, leave place by place and are cancelled, in any order."""

    @initialize(max_active=st.integers(1, 5), max_waiting=st.integers(0, 8))
    def begin(self, max_active: int, max_waiting: int) -> None:
        self.admission = Admission(max_active, max_waiting)
        self.now_s = 0.0
        self.waiting: dict[int, _Expected] = {}
        self.active: dict[int, _Expected] = {}
        self.tickets: list[Ticket] = []

    def _numbers(self, tickets: list[Ticket]) -> list[int]:
        return [next(i for i, known in enumerate(self.tickets) if known is ticket) for ticket in tickets]

    def _admissible(self) -> list[int]:
        """Admit in the model: the first by priority and arrival, as long as it fits."""
        admitted = []
        while self.waiting:
            first = min(self.waiting, key=lambda n: (-self.waiting[n].priority, self.waiting[n].arrival))
            if sum(e.places for e in self.active.values()) + self.waiting[first].places > self.admission.max_active:
                break
            self.active[first] = self.waiting.pop(first)
            admitted.append(first)
        return admitted

    @rule(priority=st.integers(-1, 1), places=st.integers(1, 5), pause_s=st.floats(0, 3))
    def enter(self, priority: int, places: int, pause_s: float) -> None:
        self.now_s += pause_s
        if places > self.admission.max_active:
            with pytest.raises(ValueError, match="places of"):
                self.admission.enter(priority, places, self.now_s)
            return
        ticket, admitted = self.admission.enter(priority, places, self.now_s)
        number = len(self.tickets)
        self.tickets.append(ticket)
        self.waiting[number] = _Expected(priority, number, places)
        assert self._numbers(admitted) == self._admissible()
        if number in self.waiting and sum(e.places for e in self.waiting.values()) > self.admission.max_waiting:
            del self.waiting[number]

    @precondition(lambda self: self.active)
    @rule(data=st.data(), pause_s=st.floats(0, 3))
    def leave(self, data: st.DataObject, pause_s: float) -> None:
        self.now_s += pause_s
        number = data.draw(st.sampled_from(sorted(self.active)))
        places = data.draw(st.integers(1, self.active[number].places))
        self.active[number].places -= places
        if self.active[number].places == 0:
            del self.active[number]
        admitted = self.admission.leave(self.tickets[number], places, self.now_s)
        assert self._numbers(admitted) == self._admissible()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Whatever has become of it, and also twice."""
        number = data.draw(st.integers(0, len(self.tickets) - 1))
        self.waiting.pop(number, None)
        self.active.pop(number, None)
        admitted = self.admission.cancel(self.tickets[number], self.now_s)
        assert self._numbers(admitted) == self._admissible()

    @invariant()
    def counts_and_states_are_the_models(self) -> None:
        assert self.admission.active == sum(e.places for e in self.active.values()) <= self.admission.max_active
        assert self.admission.waiting == sum(e.places for e in self.waiting.values()) <= self.admission.max_waiting
        for number, ticket in enumerate(self.tickets):
            expected = (
                TicketState.WAITING
                if number in self.waiting
                else TicketState.ADMITTED
                if number in self.active
                else TicketState.GONE
            )
            assert ticket.state is expected

    @invariant()
    def departed_waiters_take_no_memory(self) -> None:
        assert len(self.admission._heap) <= 2 * len(self.waiting)


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("places", [-1, 0, 3])
def test_a_request_needs_one_to_all_of_the_places(places: int) -> None:
    admission = Admission(2, 2)
    with pytest.raises(ValueError, match="places of 2"):
        admission.enter(0, places, 0.0)
    assert (admission.active, admission.waiting) == (0, 0)


@pytest.mark.parametrize("places", [-1, 0, 3])
def test_one_to_all_of_the_places_held_can_be_given_back(places: int) -> None:
    admission = Admission(5, 0)
    ticket, _ = admission.enter(0, 2, 0.0)
    with pytest.raises(ValueError, match="given back"):
        admission.leave(ticket, places, 1.0)
    assert admission.active == 2


def test_a_place_cannot_be_given_back_twice() -> None:
    admission = Admission(2, 0)
    ticket, _ = admission.enter(0, 1, 0.0)
    admission.leave(ticket, 1, 1.0)
    with pytest.raises(ValueError, match="given back"):
        admission.leave(ticket, 1, 1.0)
    assert admission.active == 0


def serve(admission: Admission, start_s: float, rounds: int, hold_s: float) -> float:
    """Hold all places for `hold_s`, several rounds; return the time at the end."""
    for _ in range(rounds):
        tickets = [admission.enter(0, 1, start_s)[0] for _ in range(admission.max_active)]
        start_s += hold_s
        for ticket in tickets:
            admission.leave(ticket, 1, start_s)
    return start_s


def fill(admission: Admission, now_s: float) -> None:
    for _ in range(admission.max_active + admission.max_waiting):
        admission.enter(0, 1, now_s)


@given(hold_s=st.floats(0.05, 20), idle_s=st.floats(0, 1e5))
def test_the_hint_is_the_queue_over_the_rate_also_after_idle_times(hold_s: float, idle_s: float) -> None:
    """max_active places held for hold_s each give a rate of max_active / hold_s, however long nothing happened."""
    admission = Admission(max_active=50, max_waiting=100)
    now_s = serve(admission, 0.0, rounds=4, hold_s=hold_s) + idle_s
    fill(admission, now_s)
    assert admission.retry_after_s(now_s) == pytest.approx(101 * hold_s / 50, rel=0.02)


def test_before_anything_is_known_the_hint_rests_on_a_guess_and_grows_while_nothing_leaves() -> None:
    admission = Admission(max_active=10, max_waiting=10)
    fill(admission, 0.0)
    assert admission.retry_after_s(0.0) == pytest.approx(11 * INITIAL_HOLD_S / 10)
    assert admission.retry_after_s(30.0) > 10 * admission.retry_after_s(0.0)


def test_a_thousand_departed_waiters_cost_no_walk() -> None:
    """Removal is O(1) on average: the heap is rebuilt only when half of it is gone."""
    admission = Admission(1, 100_000)
    admission.enter(0, 1, 0.0)
    tickets = [admission.enter(i % 3, 1, 0.0)[0] for i in range(1000)]
    rebuilt = 0
    for ticket in tickets:
        before = admission._heap
        admission.cancel(ticket, 0.0)
        rebuilt += admission._heap is not before
    assert (admission.waiting, len(admission._heap)) == (0, 0)
    assert rebuilt <= 11


def test_those_that_still_wait_keep_their_order_when_most_have_gone() -> None:
    """Also after the heap was rebuilt without the tickets that are gone."""
    draw = random.Random(7)
    admission = Admission(1, 1000)
    (active,) = admission.enter(0, 1, 0.0)[1]
    waiting = [admission.enter(draw.randrange(50), 1, 0.0)[0] for _ in range(200)]
    draw.shuffle(waiting)
    while len(waiting) > 50:
        admission.cancel(waiting.pop(), 0.0)
    admitted: list[Ticket] = []
    while freed := admission.leave(active, 1, 0.0):
        (active,) = freed
        admitted.append(active)
    assert admitted == sorted(waiting)
    assert len(admitted) == 50


def test_waiters_that_leave_take_no_memory_however_many_were_admitted_before() -> None:
    admission = Admission(1, 1000)
    (active,) = admission.enter(0, 1, 0.0)[1]
    for _ in range(100):
        admission.enter(0, 1, 0.0)
        (active,) = admission.leave(active, 1, 0.0)
    waiting = [admission.enter(0, 1, 0.0)[0] for _ in range(100)]
    for ticket in waiting[1:]:
        admission.cancel(ticket, 0.0)
    assert admission.waiting == 1
    assert len(admission._heap) <= 2
