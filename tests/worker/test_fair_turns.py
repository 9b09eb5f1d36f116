"""Turns: fair to callers, bounded, and given back however their holder ends."""

import asyncio

import pytest

from penstock.services.domain.errors import Overloaded
from penstock.worker_service.grammar.fair_turns import FairTurns


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Holder:
    """Takes turns in tasks, and notes in which order."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns, self.begun, self.go_on = turns, list[str](), asyncio.Event()

    def take(self, caller: str, name: str = "") -> "asyncio.Task[None]":
        async def hold() -> None:
            async with self.turns.turn(caller):
                self.begun.append(name or caller)
                await self.go_on.wait()

        return asyncio.create_task(hold())


async def test_callers_have_their_turns_one_after_the_other() -> None:
    """Who asks for many turns waits, after each, for one turn of everybody else who waits."""
    holder = Holder(FairTurns(1, 100))
    tasks = [holder.take("many", f"many{i}") for i in range(4)] + [holder.take("one"), holder.take("other")]
    await settled()
    holder.go_on.set()
    await asyncio.gather(*tasks)
    assert holder.begun == ["many0", "one", "other", "many1", "many2", "many3"]


async def test_a_caller_has_one_turn_at_a_time_and_all_together_as_many_as_there_are() -> None:
    holder = Holder(FairTurns(2, 100))
    tasks = [holder.take(caller) for caller in ("a", "a", "b", "c")]
    await settled()
    assert holder.begun == ["a", "b"]
    holder.go_on.set()
    await asyncio.gather(*tasks)
    assert sorted(holder.begun) == ["a", "a", "b", "c"]


async def test_a_caller_rests_after_a_turn_and_others_do_not() -> None:
    """What it leaves free is theirs."""
    holder = Holder(FairTurns(1, 100))
    holder.go_on.set()
    for rest_s in (0.001, 3600.0):
        async with holder.turns.turn("a") as turn:
            turn.rest_s = rest_s
    waits = holder.take("a")
    await holder.take("b")
    assert holder.begun == ["b"]
    waits.cancel()


async def test_a_turn_comes_back_from_whoever_fails_or_leaves() -> None:
    """Also from one that is cancelled while it waits, and just when it has been given its turn."""
    turns = FairTurns(1, 100)
    holder = Holder(turns)
    with pytest.raises(ValueError, match="bug"):
        async with turns.turn("a"):
            raise ValueError("bug")
    first = holder.take("a")
    await settled()
    waits, given = holder.take("a"), holder.take("b")
    await settled()
    waits.cancel()
    await settled()
    first.cancel()
    while not first.done():
        await asyncio.sleep(0)
    given.cancel()  # it has the turn, and has not run since
    await asyncio.gather(first, waits, given, return_exceptions=True)
    assert holder.begun in (["a"], ["a", "b"])
    assert turns._waiting == {}
    for caller in ("a", "b", "c"):
        async with asyncio.timeout(60), turns.turn(caller):
            pass


async def test_no_more_wait_than_the_bound_and_half_of_them_for_one_caller() -> None:
    turns = FairTurns(1, 4)
    holder = Holder(turns)
    tasks = [holder.take("a") for _ in range(3)]
    await settled()
    with pytest.raises(Overloaded):
        async with turns.turn("a"):
            pass
    tasks += [holder.take(caller) for caller in ("b", "c")]
    await settled()
    with pytest.raises(Overloaded):
        async with turns.turn("d"):
            pass
    holder.go_on.set()
    await asyncio.gather(*tasks)
