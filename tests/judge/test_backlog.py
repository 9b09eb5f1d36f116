"""A judge takes no more than it can do, says truly when to come again, and computes nothing that nobody waits for."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from penstock.judge_service.scorers.exact import ExactScorer
from penstock.judge_service.scoring.backlog import FIRST_RETRY_S, Backlog
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.judge_service.scoring.registry import RegisteredScorer, ScorerRegistry
from penstock.services.domain.errors import DeadlineExceeded, InvalidRequest, Overloaded
from penstock.types.judging import JudgedAnswer, ScorerInfo
from penstock.types.prompts import TextPrompt
from tests.support.virtual_clock import VirtualClock


def busy(backlog: Backlog, clock: VirtualClock, answers: int, per_s: float, ends: int) -> list[ExitStack]:
    """Fill a backlog, then have so many of its answers end at a rate; what is still there."""
    places = []
    for _ in range(answers):
        stack = ExitStack()
        stack.enter_context(backlog.place(1, None))
        places.append(stack)
    for _ in range(ends):
        clock.sleep(1 / per_s)
        places.pop(0).close()
    return places


def test_what_waits_is_bounded_and_comes_free() -> None:
    backlog = Backlog(8, at_once=2)
    with backlog.place(5, None), backlog.place(3, None):
        with pytest.raises(Overloaded) as refused, backlog.place(1, None):
            pass
        assert refused.value.retry_after_s == FIRST_RETRY_S
        assert backlog.answers == 8
    assert backlog.answers == 0
    with pytest.raises(InvalidRequest, match="items: at most 8 at once, not 9"), backlog.place(9, None):
        pass


def test_a_refusal_says_when_to_come_again() -> None:
    """By the rate at which answers have ended while others waited. Who would be judged too late is refused at once, with the
    time after which it is judged in time."""
    clock = VirtualClock()
    backlog = Backlog(40, at_once=4, clock=clock.now)
    waiting = busy(backlog, clock, 40, per_s=10.0, ends=20)
    assert backlog.answers == len(waiting) == 20
    assert backlog.wait_s() == pytest.approx((20 - 4 + 1) / 10)
    with pytest.raises(Overloaded) as refused, backlog.place(30, None):
        pass
    assert refused.value.retry_after_s == pytest.approx(10 / 10)
    with backlog.place(1, 10.0):
        pass
    with pytest.raises(Overloaded) as refused, backlog.place(1, 1.0):
        pass
    assert refused.value.retry_after_s == pytest.approx(0.7)


def test_few_answers_say_nothing_about_the_rate() -> None:
    """A judge with little to do is not slow: nobody is refused for that."""
    clock = VirtualClock()
    backlog = Backlog(40, at_once=4, clock=clock.now)
    for _ in range(50):
        clock.sleep(1.0)
        with backlog.place(1, 0.001):
            pass
    with backlog.place(4, None), backlog.place(4, 0.001):
        assert backlog.wait_s() == 0.0


class Held(Scorer):
    """A scorer that answers when it is told to, one answer at a time."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = asyncio.Event()
        self._turn = asyncio.Lock()

    async def score(self, answers: Sequence[JudgedAnswer]) -> list[RawScore]:
        async with self._turn:
            self.begun += [answer.answer for answer in answers]
            await self.go_on.wait()
        return [RawScore(0.0, 0.0)] * len(answers)


def one(answer: str) -> list[JudgedAnswer]:
    return [JudgedAnswer(TextPrompt("p"), answer)]


async def test_what_nobody_waits_for_is_never_begun() -> None:
    """Neither where the caller has gone nor where its time is up; their places come free at once."""
    scorer, backlog = Held(), Backlog(8, at_once=1)
    registry = ScorerRegistry([RegisteredScorer(ScorerInfo("s"), scorer, None, backlog)], "s")
    first = asyncio.create_task(registry.judge("s", one("first")))
    while not scorer.begun:
        await asyncio.sleep(0)
    gone = asyncio.create_task(registry.judge("s", one("gone")))
    late = asyncio.create_task(registry.judge("s", one("late"), 0.01))
    with pytest.raises(DeadlineExceeded):
        await late
    gone.cancel()
    await asyncio.wait([gone])
    assert backlog.answers == 1
    scorer.go_on.set()
    await first
    await registry.judge("s", one("last"))
    assert scorer.begun == ["first", "last"]
    assert backlog.answers == 0


async def test_scorers_that_only_compare_have_no_queue() -> None:
    registry = ScorerRegistry([RegisteredScorer(ScorerInfo("s"), ExactScorer("text"), None)], "s")
    answers = [JudgedAnswer(TextPrompt("p"), "4", reference="4")] * 1_000
    assert len((await registry.judge("s", answers, 5.0))[1]) == 1_000
