"""The batch scheduler: budgets hold, nobody starves, every token is computed once, nothing leaks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.domain import FinishReason, SamplingParams
from worker_service.scheduling import (
    BatchLimits,
    BatchScheduler,
    BlockPool,
    IllegalTransition,
    OutOfBlocks,
    Phase,
    Sequence,
)

GREEDY = SamplingParams(temperature=0.0)


def sequence(name: str, prompt: int, output: int = 4, priority: int = 0, first: int = 0) -> Sequence:
    return Sequence(name, [first + i for i in range(prompt)], GREEDY, max_output_tokens=output, priority=priority)


def scheduler(blocks: int = 64, block_tokens: int = 4, running: int = 8, step: int = 16) -> BatchScheduler:
    return BatchScheduler(BatchLimits(running, step), BlockPool(blocks, block_tokens))


def run_step(s: BatchScheduler, allocation: dict[str, int] | None = None) -> dict[str, int]:
    """Plan and commit a step; finish what has all its output. Returns tokens by request."""
    plan = s.plan_step(allocation)
    s.commit(plan, {c.sequence.request_id: [7] for c in plan.chunks if c.logits})
    for chunk in plan.chunks:
        if chunk.logits and chunk.sequence.output_tokens >= chunk.sequence.max_output_tokens:
            s.finish(chunk.sequence.request_id, FinishReason.LENGTH)
    return {c.sequence.request_id: c.count for c in plan.chunks}


def test_decodes_go_first_and_prompts_take_what_is_left_in_chunks() -> None:
    s = scheduler(step=10)
    s.add(sequence("a", 4))
    assert run_step(s) == {"a": 4}
    s.add(sequence("b", 25, first=100))
    assert run_step(s) == {"a": 1, "b": 9}
    assert run_step(s) == {"a": 1, "b": 9}
    assert run_step(s) == {"a": 1, "b": 7}  # a has its four tokens, b its first
    assert run_step(s) == {"b": 1}


def test_the_explicit_allocation_is_followed_to_the_token() -> None:
    s = scheduler(step=16)
    for name in "abc":
        s.add(sequence(name, 10, first=ord(name) * 100))
    assert run_step(s, {"b": 3}) == {"b": 3}
    assert run_step(s, {"b": 2, "c": 10}) == {"b": 2, "c": 10}
    assert run_step(s, {"b": 99 - 88, "c": 1}) == {"b": 5, "c": 1}  # at most what is pending
    found = s.get("c")
    assert found is not None
    assert found.output_tokens == 2


@pytest.mark.parametrize("allocation", [{"x": 1}, {"a": 0}, {"a": 17}])
def test_an_unsound_allocation_is_refused(allocation: dict[str, int]) -> None:
    s = scheduler(step=16)
    s.add(sequence("a", 30))
    with pytest.raises(ValueError, match=r"."):
        s.plan_step(allocation)


def test_the_one_admitted_last_is_preempted_and_comes_back_first() -> None:
    s = scheduler(blocks=4, block_tokens=2, step=16)
    s.add(sequence("a", 3, output=5))
    s.add(sequence("b", 3, output=5, first=50))
    run_step(s)
    run_step(s)  # both fill their second block
    plan = s.plan_step()
    assert plan.preempted == ("b",)
    assert [c.sequence.request_id for c in plan.chunks] == ["a"]
    b = s.get("b")
    assert b is not None
    assert b.phase is Phase.WAITING
    assert b.preemptions == 1
    assert b.output_tokens == 2  # tokens are never dropped


def test_priority_goes_first_and_is_preempted_last() -> None:
    s = scheduler(running=1)
    s.add(sequence("low", 4))
    s.add(sequence("high", 4, priority=5, first=50))
    s.add(sequence("mid", 4, priority=3, first=70))
    order = []
    while not s.idle:
        order += [name for name in run_step(s) if name not in order]
    assert order == ["high", "mid", "low"]
    s = scheduler(blocks=4, block_tokens=2)
    s.add(sequence("high", 3, output=5, priority=1))
    run_step(s)
    s.add(sequence("low", 3, output=5, first=50))
    run_step(s)
    plan = s.plan_step()
    assert "low" in plan.preempted or [c.sequence.request_id for c in plan.chunks] == ["high", "low"]
    assert "high" not in plan.preempted


def test_a_common_prefix_is_computed_once() -> None:
    s = scheduler(step=64)
    s.add(sequence("a", 17))
    assert run_step(s) == {"a": 17}
    s.add(sequence("b", 17))
    assert run_step(s) == {"a": 1, "b": 1}  # 16 of 17 tokens stand in four blocks
    found = s.get("b")
    assert found is not None
    assert found.cached_prompt_tokens == 16


def test_the_last_prompt_token_is_always_computed() -> None:
    s = scheduler(step=64)
    s.add(sequence("a", 16))
    run_step(s)
    s.add(sequence("b", 16))
    assert run_step(s)["b"] == 4  # the last block again: its last token's logits are needed


def test_a_draft_wants_logits_from_the_token_before_it_on() -> None:
    s = scheduler(step=5)
    s.add(Sequence("v", list(range(10)), GREEDY, max_output_tokens=3, output=[1, 2, 3], draft=3))
    assert [(c.count, c.logits) for c in s.plan_step().chunks] == [(5, 0)]
    s.commit(s.plan_step(), {})
    plans = []
    while (plan := s.plan_step()).chunks:
        plans.append((plan.chunks[0].count, plan.chunks[0].logits))
        s.commit(plan, {})
    assert plans == [(5, 1), (3, 3)]


def test_adopted_kv_starts_running_and_too_much_of_it_changes_nothing() -> None:
    s = scheduler(blocks=4, block_tokens=4)
    moved = sequence("m", 10)
    room = s.reserve(moved.tokens[:5])
    s.extend(room, 3)
    assert len(room.blocks) == 3
    s.adopt(moved, room, 9)
    assert moved.phase is Phase.RUNNING
    assert run_step(s) == {"m": 1}
    with pytest.raises(OutOfBlocks, match="blocks"):
        s.reserve(range(100, 112))
    assert s.pool.free == 1
    with pytest.raises(ValueError, match="blocks for"):
        s.adopt(sequence("n", 12, first=100), s.reserve(range(100, 103)), 11)
    assert s.get("n") is None


def test_a_reservation_keeps_its_place_and_its_blocks_until_it_is_released() -> None:
    s = scheduler(blocks=6, block_tokens=4, running=1)
    room = s.reserve(range(8))
    s.add(sequence("a", 3, first=50))
    assert run_step(s) == {}
    with pytest.raises(OutOfBlocks, match="limit on running requests"):
        s.reserve(range(4))
    s.release(room)
    assert s.pool.free == 6
    assert run_step(s) == {"a": 3}


def test_a_paused_sequence_gets_no_token_and_keeps_its_blocks() -> None:
    s = scheduler(blocks=3, block_tokens=4)
    for name, first in (("a", 0), ("b", 50)):
        s.add(sequence(name, 4, output=20, first=first))
    assert run_step(s) == {"a": 4, "b": 4}
    paused = s.get("b")
    assert paused is not None
    paused.paused = True
    for _ in range(4):
        assert run_step(s) == {"a": 1}
    assert run_step(s) == {}  # no block is free, and b, who came last, is not the one to give up its own
    assert (paused.phase, len(paused.blocks)) == (Phase.RUNNING, 1)
    assert s.plan_step({"b": 1}).chunks == ()
    paused.paused = False
    assert run_step(s) == {"b": 1}


def test_an_illegal_transition_tells_the_history() -> None:
    one = sequence("a", 3)
    one.move(Phase.RUNNING)
    one.move(Phase.FINISHED)
    with pytest.raises(IllegalTransition, match="waiting -> running -> finished"):
        one.move(Phase.RUNNING)


@settings(max_examples=300, deadline=None)
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
                s.finish(c.sequence.request_id, FinishReason.LENGTH)
                ended[c.sequence.request_id] = c.sequence
        steps += 1
        assert steps < 5000, "no progress"
    assert {name: one.output_tokens for name, one in ended.items()} == wanted
    assert s.pool.free == s.pool.count
