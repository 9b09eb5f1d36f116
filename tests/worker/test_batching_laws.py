"""Laws of the batch scheduler on rare ways: reservations, adoption, refusals, drafts, what a policy is told."""

from collections.abc import Sequence as Seq

import pytest

from services.domain import FinishReason, SamplingParams
from worker_service.scheduling import BatchLimits, BatchScheduler, BlockPool, OutOfBlocks, Phase, Sequence
from worker_service.scheduling.policies import DecodeFirst
from worker_service.scheduling.steps import Chunk

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


def step(s: BatchScheduler, allocation: dict[str, int] | None = None, end_s: float = 0.0) -> dict[str, int]:
    plan = s.plan_step(allocation)
    s.commit(plan, {c.sequence.request_id: [7] for c in plan.chunks if c.logits}, end_s)
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
    assert s.finish("moved", None) is moved
    assert (moved.phase, moved.finish_reason) == (Phase.FINISHED, None)
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


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ABORTED, None])
def test_the_end_of_a_sequence_has_its_reason(reason: FinishReason | None) -> None:
    """Whether it runs or waits."""
    s = scheduler(running=1)
    s.add(sequence("runs", 4))
    s.add(sequence("waits", 4, first=50))
    step(s)
    for name in ("runs", "waits"):
        ended = s.finish(name, reason)
        assert ended is not None
        assert (ended.phase, ended.finish_reason) == (Phase.FINISHED, reason)
    assert s.finish("runs", reason) is None
    assert (s.idle, s.pool.free, s.free_places) == (True, 16, 1)


def test_an_allocation_may_use_the_whole_step() -> None:
    s = scheduler(step=6)
    s.add(sequence("a", 9))
    s.add(sequence("b", 9, first=50))
    assert step(s, {"a": 4, "b": 2}) == {"a": 4, "b": 2}
    with pytest.raises(ValueError, match="7 tokens, but a step has 6"):
        s.plan_step({"a": 4, "b": 3})


def test_requests_of_an_allocation_do_not_preempt_each_other() -> None:
    """Whoever is named keeps its blocks; only others give up theirs."""
    s = scheduler(blocks=4)
    for name, first in (("a", 0), ("b", 50), ("c", 90)):
        s.add(sequence(name, 2, output=8, first=first))
    assert step(s, {"a": 2, "b": 2, "c": 2}) == {"a": 2, "b": 2, "c": 2}  # one block is left
    plan = s.plan_step({"a": 1, "b": 1})
    assert plan.preempted == ("c",)
    assert [c.sequence.request_id for c in plan.chunks] == ["a", "b"]
    s.commit(plan, {"a": [7], "b": [7]})
    assert step(s, {"a": 1, "b": 1}) == {"a": 1, "b": 1}
    plan = s.plan_step({"a": 1, "b": 1})  # no block is left, and nobody else has one
    assert plan.preempted == ()
    assert plan.chunks == ()


@pytest.mark.parametrize("draft", [1, 3, 6])
def test_a_draft_that_is_cached_is_verified_all_the_same(draft: int) -> None:
    """The logits of each of its positions, and of the one behind it, are computed: else all of it would count as rejected."""
    s = scheduler(step=64)
    s.add(sequence("first", 12))
    step(s)
    s.finish("first", FinishReason.STOP)
    verified = sequence("again", 12)
    verified.draft = draft
    s.add(verified)
    (chunk,) = s.plan_step().chunks
    assert chunk.logits == draft + 1
    assert chunk.start + chunk.count == 12
    assert chunk.start > 0 or draft > 9  # the rest comes from the cache


def test_the_policy_is_told_of_everything_once() -> None:
    s = scheduler(blocks=4)
    s.add(sequence("a", 3, output=9))
    s.add(sequence("b", 3, output=9, first=50))
    assert step(s, end_s=1.5) == {"a": 3, "b": 3}
    step(s, end_s=2.0)
    plan = s.plan_step()
    assert plan.preempted == ("b",)
    s.commit(plan, {"a": [7]}, 2.5)
    s.finish("b", FinishReason.ABORTED)
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
    paused = s.get("paused")
    assert paused is not None
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
    s.finish("old", FinishReason.STOP)
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
    a, b = s.get("a"), s.get("b")
    assert a is not None
    assert b is not None
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


def test_what_is_preempted_holds_nothing() -> None:
    s = scheduler(blocks=4)
    for name in ("a", "b"):
        s.add(sequence(name, 3, output=9, first=10 * ord(name)))
    step(s)
    step(s)
    assert s.plan_step().preempted == ("b",)
    b = s.get("b")
    assert b is not None
    assert (b.blocks, b.computed, b.sealed, b.pending) == ([], 0, 0, 5)
