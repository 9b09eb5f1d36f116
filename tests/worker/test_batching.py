"""The batch scheduler: budgets hold, nobody starves, every token is computed once, nothing leaks, the policy is told."""

import random
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.types.sampling import SamplingParams
from penstock.worker_service.scheduling.batching import BatchLimits, BatchScheduler
from penstock.worker_service.scheduling.blocks import BlockPool, OutOfBlocks
from penstock.worker_service.scheduling.policies import DecodeFirst
from penstock.worker_service.scheduling.sequence import Phase, Sequence
from penstock.worker_service.scheduling.steps import Chunk
from tests.support.present import present

GREEDY = SamplingParams(temperature=0.0)


class Recorder(DecodeFirst):
    """A policy that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[object, ...]] = []

    def added(self, sequence: Sequence) -> None:
        self.notes.append(("added", sequence.request_id))

    def finished(self, sequence: Sequence) -> None:
        self.notes.append(("finished", sequence.request_id))

    def preempted(self, sequence: Sequence) -> None:
        self.notes.append(("preempted", sequence.request_id))

    def committed(self, chunks: Seq[Chunk], end_s: float) -> None:
        self.notes.append(("committed", [chunk.sequence.request_id for chunk in chunks], end_s))


def sequence(name: str, prompt: int, output: int = 4, priority: int = 0, first: int = 0) -> Sequence:
    return Sequence(name, [first + i for i in range(prompt)], GREEDY, max_output_tokens=output, priority=priority)


def scheduler(blocks: int = 16, block_tokens: int = 2, running: int = 4, step: int = 16) -> BatchScheduler:
    return BatchScheduler(BatchLimits(running, step), BlockPool(blocks, block_tokens), Recorder())


def notes(s: BatchScheduler) -> list[tuple[object, ...]]:
    assert isinstance(s.policy, Recorder)
    return s.policy.notes


def step(s: BatchScheduler, end_s: float = 0.0) -> dict[str, int]:
    """Plan and commit a step; finish what has all its output. Returns tokens by request."""
    plan = s.plan_step()
    s.commit(plan, {c.sequence.request_id: [7] for c in plan.chunks if c.logits}, end_s)
    for chunk in plan.chunks:
        if chunk.logits and chunk.sequence.output_tokens >= chunk.sequence.max_output_tokens:
            s.finish(chunk.sequence.request_id)
    return {c.sequence.request_id: c.count for c in plan.chunks}


def test_an_id_in_use_is_refused_and_nothing_changes() -> None:
    s = scheduler()
    first = sequence("a", 4)
    s.add(first)
    with pytest.raises(ValueError, match="a is already in the engine"):
        s.add(sequence("a", 6))
    reservation = s.reserve([1, 2])
    with pytest.raises(ValueError, match="a is already in the engine"):
        s.adopt(sequence("a", 4), reservation, 2)
    assert s.get("a") is first
    assert len(s.waiting) == 1
    assert s.free_places == 3
    s.release(reservation)
    assert (s.free_places, s.pool.free) == (4, 16)


def test_a_reservation_takes_a_place_and_its_blocks_until_it_is_released() -> None:
    """Not one of them is lost, however often this happens; what there is no room for changes nothing."""
    s = scheduler(blocks=4, running=2)
    for _ in range(6):
        one, two = s.reserve([1, 2, 3]), s.reserve([4])
        assert (s.free_places, s.pool.free) == (0, 1)
        with pytest.raises(OutOfBlocks, match="limit on running requests"):
            s.reserve([5])
        s.extend(one, 2)
        assert s.pool.free == 1
        s.extend(one, 3)
        assert (len(one.blocks), s.pool.free) == (3, 0)
        with pytest.raises(OutOfBlocks):
            s.extend(two, 2)
        s.release(one)
        with pytest.raises(OutOfBlocks, match="4 blocks are needed, 3 free"):
            s.reserve([*range(8)])
        s.release(two)
        assert (s.free_places, s.pool.free) == (2, 4)
    held = [s.reserve([1]), s.reserve([2])]
    s.add(sequence("a", 3, first=50))
    assert step(s) == {}
    s.release(held[0])
    assert step(s) == {"a": 3}


@pytest.mark.parametrize("computed", [0, 4, 5])
def test_only_part_of_a_sequence_can_be_adopted(computed: int) -> None:
    """Its last token is always computed here."""
    s = scheduler()
    reservation = s.reserve([1, 2, 3])
    with pytest.raises(ValueError, match="1 to 3 tokens can be adopted"):
        s.adopt(sequence("a", 4), reservation, computed)
    with pytest.raises(ValueError, match="2 blocks for 2 tokens"):
        s.adopt(sequence("a", 4), reservation, 2)
    assert s.idle
    assert s.free_places == 3


def test_an_adopted_sequence_is_one_like_any_other() -> None:
    """It is known by its id, holds one place, continues where its KV ends, and yields all of it at its end."""
    s = scheduler()
    reservation = s.reserve([0, 1, 2])
    moved = sequence("moved", 4)
    s.adopt(moved, reservation, 3)
    assert s.get("moved") is moved
    assert not s.idle
    assert (s.free_places, moved.phase, moved.computed) == (3, Phase.RUNNING, 3)
    assert s.pool.match([0, 1]).tokens == 2  # its full blocks serve others
    assert step(s) == {"moved": 1}
    assert s.finish("moved") is moved
    assert moved.phase is Phase.FINISHED
    assert (s.free_places, s.pool.free) == (4, 16)
    assert s.idle


def test_an_adopted_sequence_has_its_turn_in_the_order_of_arrival() -> None:
    """Behind what was there before and ahead of what comes later; two never share a turn."""
    s = scheduler()
    old, moved, new = sequence("old", 3), sequence("moved", 4, first=50), sequence("new", 3, first=90)
    s.add(old)
    s.adopt(moved, s.reserve([50, 51, 52]), 3)
    s.add(new)
    assert old.order < moved.order < new.order


def test_a_sequence_can_end_whether_it_runs_or_waits() -> None:
    s = scheduler(running=1)
    s.add(sequence("runs", 4))
    s.add(sequence("waits", 4, first=50))
    step(s)
    for name in ("runs", "waits"):
        assert present(s.finish(name)).phase is Phase.FINISHED
    assert s.finish("runs") is None
    assert (s.idle, s.pool.free, s.free_places) == (True, 16, 1)


def test_the_policy_is_told_of_everything_once() -> None:
    s = scheduler(blocks=4)
    s.add(sequence("a", 3, output=9))
    s.add(sequence("b", 3, output=9, first=50))
    assert step(s, end_s=1.5) == {"a": 3, "b": 3}
    step(s, end_s=2.0)
    plan = s.plan_step()
    assert plan.preempted == ("b",)
    s.commit(plan, {"a": [7]}, 2.5)
    s.finish("b")
    assert notes(s) == [
        ("added", "a"),
        ("added", "b"),
        ("committed", ["a", "b"], 1.5),
        ("committed", ["a", "b"], 2.0),
        ("preempted", "b"),
        ("committed", ["a"], 2.5),
        ("finished", "b"),
    ]
    assert s.preemptions == 1


def test_a_sequence_that_gets_nothing_costs_the_step_nothing() -> None:
    """Neither one that is paused nor one that has to give up its blocks: the whole step goes to the others."""
    s = scheduler(step=6)
    s.add(sequence("paused", 2, output=8))
    step(s)
    paused = present(s.get("paused"))
    paused.paused = True
    s.add(sequence("other", 12, first=50))
    assert step(s) == {"other": 6}
    assert step(s) == {"other": 6}
    s = scheduler(blocks=4, step=6)
    s.add(sequence("old", 5, output=9, priority=1))
    step(s)
    s.add(sequence("young", 2, output=9, first=50))
    assert step(s) == {"old": 1, "young": 2}
    plan = s.plan_step()  # both need a block: the young one gives up its own
    assert plan.preempted == ("young",)
    assert plan.tokens == 1
    s.commit(plan, {"old": [7]})
    s.finish("old")
    assert sum(step(s).values()) == 3  # the young one again, with what it had generated


def test_proposals_share_what_the_step_leaves_and_end_with_the_reply() -> None:
    """In equal shares of the rest, one token less than the reply may still have; who may have none is not named."""
    s = scheduler(step=9)
    for name, output in (("long", 9), ("short", 4), ("shortest", 3), ("last", 2)):
        s.add(sequence(name, 1, output=output, first=10 * output))
    step(s)
    plan = s.plan_step()
    assert plan.tokens == 4
    # 5 tokens are left for four: one each, of which "last", whose next token is its last one, can use none
    assert s.proposal_limits(plan) == {"long": 1, "short": 1, "shortest": 1}
    s = scheduler(step=64)
    for name, output in (("long", 9), ("short", 4)):
        s.add(sequence(name, 1, output=output, first=10 * output))
    step(s)
    assert s.proposal_limits(s.plan_step()) == {"long": 7, "short": 2}


def test_a_step_with_proposals_keeps_those_without_and_computes_what_stands() -> None:
    """Each request stays in the step; behind it, what is computed is what stands, and blocks of the rest are free."""
    s = scheduler(blocks=8, block_tokens=2, step=64)
    for name in ("a", "b"):
        s.add(sequence(name, 3, output=9, first=10 * ord(name)))
    step(s)
    free = s.pool.free
    plan = s.propose(s.plan_step(), {"a": [1, 2, 3]})
    assert [(c.sequence.request_id, c.logits, c.proposed) for c in plan.chunks] == [("a", 4, (1, 2, 3)), ("b", 1, ())]
    s.commit(plan, {"a": [1, 2, 9], "b": [5]})  # two of three stand
    a, b = present(s.get("a")), present(s.get("b"))
    assert (a.tokens[3:], a.computed, len(a.blocks), a.sealed) == ([7, 1, 2, 9], 6, 3, 3)
    assert (b.tokens[3:], b.computed, len(b.blocks), b.sealed) == ([7, 5], 4, 2, 2)
    assert s.pool.free == free - 1


def test_proposals_get_the_blocks_that_are_free_and_no_others() -> None:
    s = scheduler(blocks=4, block_tokens=2, step=64)
    for name in ("a", "b"):
        s.add(sequence(name, 2, output=9, first=10 * ord(name)))
    step(s)
    plan = s.plan_step()  # a third token each: all four blocks are taken, with room for one token in two of them
    assert s.pool.free == 0
    proposed = s.propose(plan, {"a": [1, 2, 3], "b": [4]})
    assert [c.proposed for c in proposed.chunks] == [(1,), (4,)]
    assert proposed.preempted == ()


def test_decodes_go_first_and_prompts_take_what_is_left_in_chunks() -> None:
    s = scheduler(64, 4, step=10)
    s.add(sequence("a", 4))
    assert step(s) == {"a": 4}
    s.add(sequence("b", 25, first=100))
    assert step(s) == {"a": 1, "b": 9}
    assert step(s) == {"a": 1, "b": 9}
    assert step(s) == {"a": 1, "b": 7}  # a has its four tokens, b its first
    assert step(s) == {"b": 1}


def test_priority_goes_first_and_is_preempted_last() -> None:
    s = scheduler(64, 4, running=1)
    s.add(sequence("low", 4))
    s.add(sequence("high", 4, priority=5, first=50))
    s.add(sequence("mid", 4, priority=3, first=70))
    order = []
    while not s.idle:
        order += [name for name in step(s) if name not in order]
    assert order == ["high", "mid", "low"]
    s = scheduler(blocks=4, block_tokens=2)
    s.add(sequence("high", 3, output=5, priority=1))
    step(s)
    s.add(sequence("low", 3, output=5, first=50))
    step(s)
    plan = s.plan_step()
    assert "low" in plan.preempted or [c.sequence.request_id for c in plan.chunks] == ["high", "low"]
    assert "high" not in plan.preempted


def test_a_common_prefix_is_computed_once() -> None:
    s = scheduler(64, 4, step=64)
    s.add(sequence("a", 17))
    assert step(s) == {"a": 17}
    s.add(sequence("b", 17))
    assert step(s) == {"a": 1, "b": 1}  # 16 of 17 tokens stand in four blocks
    found = present(s.get("b"))
    assert found.cached_prompt_tokens == 16


def test_the_last_prompt_token_is_always_computed() -> None:
    s = scheduler(64, 4, step=64)
    s.add(sequence("a", 16))
    step(s)
    s.add(sequence("b", 16))
    assert step(s)["b"] == 4  # the last block again: its last token's logits are needed


def test_a_paused_sequence_gets_no_token_and_keeps_its_blocks() -> None:
    s = scheduler(blocks=3, block_tokens=4)
    for name, first in (("a", 0), ("b", 50)):
        s.add(sequence(name, 4, output=20, first=first))
    assert step(s) == {"a": 4, "b": 4}
    paused = present(s.get("b"))
    paused.paused = True
    for _ in range(4):
        assert step(s) == {"a": 1}
    assert step(s) == {}  # no block is free, and b, who came last, is not the one to give up its own
    assert (paused.phase, len(paused.blocks)) == (Phase.RUNNING, 1)
    paused.paused = False
    assert step(s) == {"b": 1}


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_any_workload_is_served_to_the_last_token(seed: int) -> None:
    """Budgets and block counts hold at every step, everything ends, and every block comes back."""
    rng = random.Random(seed)
    block_tokens, blocks, step = rng.randint(1, 4), rng.randint(8, 24), rng.randint(1, 12)
    s = scheduler(blocks, block_tokens, running=rng.randint(1, 5), step=step)
    capacity = blocks * block_tokens
    waiting = []
    for i in range(rng.randint(1, 8)):
        prompt = rng.randint(1, min(20, capacity - 1))
        output = rng.randint(1, min(12, capacity - prompt))
        waiting.append(sequence(f"r{i}", prompt, output, rng.randint(-1, 1), rng.randint(0, 3)))
    ended: dict[str, Sequence] = {}
    wanted = {one.request_id: one.max_output_tokens for one in waiting}
    steps = 0
    while waiting or not s.idle:
        if waiting and rng.random() < 0.5:
            s.add(waiting.pop())
        plan = s.plan_step()
        assert plan.chunks or s.idle, "a step without work"
        assert plan.tokens <= step
        assert len(s.running) <= s.limits.max_running
        names = [c.sequence.request_id for c in plan.chunks]
        assert len(names) == len(set(names))
        assert not set(names) & set(plan.preempted)
        for c in plan.chunks:
            assert len(c.sequence.blocks) * block_tokens >= c.start + c.count
            assert c.start == c.sequence.computed
        held = {b for r in s.running for b in r.blocks}
        assert s.pool.free == s.pool.count - len(held)
        s.commit(plan, {c.sequence.request_id: [steps % 3] for c in plan.chunks if c.logits})
        for c in plan.chunks:
            if c.logits and c.sequence.output_tokens >= c.sequence.max_output_tokens:
                s.finish(c.sequence.request_id)
                ended[c.sequence.request_id] = c.sequence
        steps += 1
        assert steps < 5000, "no progress"
    assert {name: one.output_tokens for name, one in ended.items()} == wanted
    assert s.pool.free == s.pool.count
