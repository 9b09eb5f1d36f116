"""The admission queue: bounded, fair, and never leaking a place; the rules of admission."""

import asyncio
import random
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.router_service.admission.admission_queue import MAX_RETRY_S, MIN_RETRY_S, RETRY_JITTER, AdmissionQueue
from penstock.router_service.admission.rules import INITIAL_HOLD_S, AdmissionPlaces, Ticket, TicketState
from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.generation.cascade_generation import CascadeGeneration
from penstock.router_service.generation.request_driver import RequestDriver
from penstock.router_service.openai_gateway.replies import Choice
from penstock.router_service.telemetry.late_traces import LateTraces
from penstock.router_service.telemetry.stats import RouterStats
from penstock.services.domain.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from penstock.services.domain.mesh_view import MeshView
from penstock.types.prompts import TextPrompt
from penstock.types.sampling import SamplingParams
from tests.support.telemetry_off import telemetry_off

LATER = 1e12


async def test_the_deadline_passes_in_the_queue() -> None:
    queue = AdmissionQueue(max_active=1, max_waiting=10)
    async with queue.entered(0, LATER):
        with pytest.raises(DeadlineExceeded):
            async with queue.entered(0, asyncio.get_running_loop().time() + 0.01):
                pass
        assert (queue.waiting, len(queue._turns)) == (0, 0)
    assert queue.active == 0


async def test_no_place_leaks_whoever_is_cancelled_and_whenever() -> None:
    queue = AdmissionQueue(max_active=2, max_waiting=100)

    async def one(turns: int) -> None:
        async with queue.entered(0, LATER):
            for _ in range(turns):
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(one(i % 4)) for i in range(60)]
    for i, task in enumerate(tasks):
        await asyncio.sleep(0)
        if i % 3 == 0:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.active, queue.waiting) == (0, 0)


async def test_requests_that_belong_together_enter_together_and_two_of_them_do_not_block_each_other() -> None:
    """Each needs more than half of the places: one runs, then the other; neither holds a part."""
    queue = AdmissionQueue(max_active=5, max_waiting=20)
    most = 0

    async def three() -> None:
        nonlocal most
        async with queue.entered(0, LATER, places=3) as ticket:
            most = max(most, queue.active)
            await asyncio.sleep(0)
            queue.leave_one(ticket)
            await asyncio.sleep(0)

    async with asyncio.timeout(60):
        await asyncio.gather(*(three() for _ in range(6)))
    assert most == 5  # what one gives back early, and what is free, is used
    assert (queue.active, queue.waiting) == (0, 0)


async def test_more_together_than_can_ever_run_is_an_error_of_the_request() -> None:
    queue = AdmissionQueue(max_active=5, max_waiting=500)
    with pytest.raises(InvalidRequest) as caught:
        async with queue.entered(0, LATER, places=6):
            pass
    assert [problem.field for problem in caught.value.problems] == ["n"]
    assert (queue.active, queue.waiting) == (0, 0)


async def test_a_departed_first_waiter_lets_the_next_one_in() -> None:
    """One that waits for three places holds up those behind it; when it goes, they need not wait for a place to be left."""
    queue = AdmissionQueue(max_active=3, max_waiting=10)

    async def enter(places: int) -> None:
        async with queue.entered(0, LATER, places):
            pass

    async with queue.entered(0, LATER):
        many, one = asyncio.create_task(enter(3)), asyncio.create_task(enter(1))
        await asyncio.sleep(0)
        assert queue.waiting == 4
        many.cancel()
        await one
        assert (queue.active, queue.waiting) == (1, 0)


async def test_a_thousand_waiters_cancelled_in_one_turn_leave_nothing_behind() -> None:
    """Also where the place comes free before any of them has run: the one behind them gets it."""
    queue = AdmissionQueue(max_active=1, max_waiting=5000)

    async def enter() -> None:
        async with queue.entered(0, LATER):
            pass

    async with queue.entered(0, LATER):
        tasks = [asyncio.create_task(enter()) for _ in range(3000)]
        last = asyncio.create_task(enter())
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
    assert (queue.active, queue.waiting) == (1, 0), "the last one has been admitted already"
    await last
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.active, queue.waiting, len(queue._turns)) == (0, 0, 0)


async def test_hints_are_spread_by_jitter_and_bounded() -> None:
    queue = AdmissionQueue(max_active=1, max_waiting=10_000, jitter=random.Random(5))
    again = AdmissionQueue(max_active=1, max_waiting=10_000, jitter=random.Random(5))
    async with queue.entered(0, LATER):
        now_s = asyncio.get_running_loop().time()
        hints = [queue.retry_after_s(now_s + 1e6) for _ in range(20)]
    assert all(MAX_RETRY_S <= hint <= MAX_RETRY_S * (1 + RETRY_JITTER) for hint in hints)
    assert len(set(hints)) == len(hints)
    idle = AdmissionQueue(max_active=10_000, max_waiting=1)
    assert MIN_RETRY_S <= idle.retry_after_s(0.0) <= MIN_RETRY_S * (1 + RETRY_JITTER)
    async with again.entered(0, LATER):
        assert hints[0] == again.retry_after_s(asyncio.get_running_loop().time() + 1e6)


async def test_each_of_several_requests_gives_its_own_place_back_and_errors_are_counted_as_what_they_are() -> None:
    """One that ends before the others makes room; a refusal is a rejection, no failure."""
    queue, measured, unused = AdmissionQueue(max_active=2, max_waiting=0), telemetry_off(), cast("Any", None)
    view = MeshView()  # no plan: a request fails at once
    stats = RouterStats(measured.meter, view)
    late_traces = LateTraces(measured.tracer, measured.keeps_trace, slow_s=60.0)
    cascade = CascadeGeneration(view, unused, unused, measured.tracer)
    driver = RequestDriver(cascade, queue, stats, late_traces)
    requests = [RouterRequest(f"r{i}", "m", TextPrompt("p"), SamplingParams(), deadline_s=LATER) for i in range(3)]
    async with driver.admitted(requests[:2]) as ticket:
        with pytest.raises(Overloaded):
            await driver.drive(requests[2], Choice(2))
        assert (queue.active, stats.rejected, stats.failed) == (2, 1, 0)
        with pytest.raises(Unavailable):
            await driver.run(requests[0], ticket, Choice(0))
        assert (queue.active, stats.rejected, stats.failed) == (1, 1, 1)
    assert (queue.active, queue.waiting) == (0, 0)
    measured.close()


async def test_nothing_is_refused_early_that_the_queue_would_take() -> None:
    """Whatever the queue holds, priorities and requests of several places included."""
    rng, early = random.Random(5), 0
    for _ in range(300):
        queue, tasks = AdmissionQueue(rng.randint(1, 4), rng.randint(0, 4)), list[asyncio.Task[None]]()
        for _ in range(rng.randint(0, 8)):
            places = rng.randint(1, 2)
            if places <= queue._admission.max_active:
                tasks.append(asyncio.create_task(_hold(queue, rng.randint(-1, 1), places)))
        await asyncio.sleep(0)
        if (error := queue.refusal()) is not None:
            early += 1
            assert error.retry_after_s > 0
            with pytest.raises(Overloaded):
                async with queue.entered(100, LATER):
                    pass
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert early > 30


async def _hold(queue: AdmissionQueue, priority: int, places: int) -> None:
    async with queue.entered(priority, LATER, places):
        await asyncio.Event().wait()


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
        self.admission = AdmissionPlaces(max_active, max_waiting)
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
        ticket = self.admission.enter(priority, places, self.now_s)
        number = len(self.tickets)
        self.tickets.append(ticket)
        self.waiting[number] = _Expected(priority, number, places)
        assert (ticket.state is TicketState.ADMITTED) == (self._admissible() == [number])
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
def test_one_to_all_of_the_places_are_taken_and_given_back_once(places: int) -> None:
    """What is wrong changes nothing."""
    admission = AdmissionPlaces(2, 2)
    with pytest.raises(ValueError, match="places of 2"):
        admission.enter(0, places, 0.0)
    ticket = admission.enter(0, 2, 0.0)
    with pytest.raises(ValueError, match="given back"):
        admission.leave(ticket, places, 1.0)
    assert (admission.active, admission.waiting) == (2, 0)
    admission.leave(ticket, 2, 1.0)
    with pytest.raises(ValueError, match="given back"):
        admission.leave(ticket, 1, 1.0)
    assert admission.active == 0


def serve(admission: AdmissionPlaces, start_s: float, rounds: int, hold_s: float) -> float:
    """Hold all places for `hold_s`, several rounds; return the time at the end."""
    for _ in range(rounds):
        tickets = [admission.enter(0, 1, start_s) for _ in range(admission.max_active)]
        start_s += hold_s
        for ticket in tickets:
            admission.leave(ticket, 1, start_s)
    return start_s


def fill(admission: AdmissionPlaces, now_s: float) -> None:
    for _ in range(admission.max_active + admission.max_waiting):
        admission.enter(0, 1, now_s)


@given(hold_s=st.floats(0.05, 20), idle_s=st.floats(0, 1e5))
def test_the_hint_is_the_queue_over_the_rate_also_after_idle_times(hold_s: float, idle_s: float) -> None:
    """max_active places held for hold_s each give a rate of max_active / hold_s, however long nothing happened."""
    admission = AdmissionPlaces(max_active=50, max_waiting=100)
    now_s = serve(admission, 0.0, rounds=4, hold_s=hold_s) + idle_s
    fill(admission, now_s)
    assert admission.retry_after_s(now_s) == pytest.approx(101 * hold_s / 50, rel=0.02)


def test_before_anything_is_known_the_hint_rests_on_a_guess_and_grows_while_nothing_leaves() -> None:
    admission = AdmissionPlaces(max_active=10, max_waiting=10)
    fill(admission, 0.0)
    assert admission.retry_after_s(0.0) == pytest.approx(11 * INITIAL_HOLD_S / 10)
    assert admission.retry_after_s(30.0) > 10 * admission.retry_after_s(0.0)


def test_who_is_left_after_many_have_gone_enters_in_order() -> None:
    """By priority, then by arrival; whoever gives up before."""
    rng = random.Random(3)
    for _ in range(100):
        admission = AdmissionPlaces(1, 100)
        held, priorities = admission.enter(0, 1, 0.0), [rng.randrange(5) for _ in range(20)]
        tickets = [admission.enter(priority, 1, 0.0) for priority in priorities]
        left = rng.sample(range(20), 6)
        for number in set(range(20)) - set(left):
            admission.cancel(tickets[number], 0.0)
        entered = []
        while admission.waiting:
            (held,) = admission.leave(held, 1, 0.0)
            assert len(admission._heap) <= 2 * admission.waiting
            entered.append(next(number for number in left if tickets[number] is held))
        assert entered == sorted(left, key=lambda number: (-priorities[number], number))


async def test_who_waits_is_told_once_and_who_enters_at_once_is_not() -> None:
    queue, told = AdmissionQueue(max_active=1, max_waiting=1), list[str]()

    async def second() -> None:
        async with queue.entered(0, LATER, 1, lambda: told.append("second")):
            pass

    async with queue.entered(0, LATER, on_wait=lambda: told.append("first")):
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        assert told == ["second"]
    await waiting
    assert told == ["second"]


def test_a_thousand_departed_waiters_cost_no_walk() -> None:
    """Removal is O(1) on average: the heap is rebuilt only when half of it is gone."""
    admission = AdmissionPlaces(1, 100_000)
    admission.enter(0, 1, 0.0)
    tickets = [admission.enter(i % 3, 1, 0.0) for i in range(1000)]
    rebuilt = 0
    for ticket in tickets:
        before = admission._heap
        admission.cancel(ticket, 0.0)
        rebuilt += admission._heap is not before
    assert (admission.waiting, len(admission._heap)) == (0, 0)
    assert rebuilt <= 11
