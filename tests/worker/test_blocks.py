"""The block pool: no block is ever held twice by accident, lost, or found under another prefix."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker_service.scheduling import BlockPool, OutOfBlocks
from worker_service.scheduling.blocks import ROOT

SIZE = 2
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def test_a_known_prefix_is_found_in_whole_blocks() -> None:
    pool = BlockPool(8, SIZE)
    blocks = pool.take(2)
    node = pool.seal(blocks[0], ROOT, [1, 2])
    pool.seal(blocks[1], node, [3, 4])
    match = pool.match([1, 2, 3, 4, 5])
    assert match.blocks == tuple(blocks)
    assert match.tokens == 4
    assert pool.match([1, 2, 3]).tokens == 2
    assert pool.match([2, 2, 3, 4]).tokens == 0


def test_what_is_let_go_stays_findable_until_its_room_is_needed() -> None:
    pool = BlockPool(3, SIZE)
    blocks = pool.take(2)
    node = pool.seal(blocks[0], ROOT, [1, 2])
    pool.seal(blocks[1], node, [3, 4])
    pool.release(blocks)
    assert pool.free == 3
    assert pool.match([1, 2, 3, 4]).tokens == 4
    pool.take(2)  # the third block, then the end of the prefix: its beginning is kept longest
    assert pool.match([1, 2, 3, 4]).tokens == 2


def test_taking_too_many_takes_nothing() -> None:
    pool = BlockPool(3, SIZE)
    pool.take(1)
    with pytest.raises(OutOfBlocks):
        pool.take(3)
    assert pool.free == 2


def test_can_take_counts_idle_blocks_of_the_match_itself() -> None:
    pool = BlockPool(2, SIZE)
    blocks = pool.take(1)
    pool.seal(blocks[0], ROOT, [1, 2])
    pool.release(blocks)
    match = pool.match([1, 2, 3, 4])
    assert pool.can_take(match, 1)
    assert not pool.can_take(match, 2)


class PoolMachine(RuleBasedStateMachine):
    """Sequences take, share, seal and release blocks in any order."""

    @initialize(count=st.integers(1, 12))
    def build(self, count: int) -> None:
        self.pool = BlockPool(count, SIZE)
        self.held: list[tuple[list[int], list[int]]] = []  # (blocks, tokens that they hold)

    @rule(tokens=TOKENS)
    def begin(self, tokens: list[int]) -> None:
        match = self.pool.match(tokens)
        needed = -(-len(tokens) // SIZE) - len(match.blocks)
        if not self.pool.can_take(match, needed):
            before = self.pool.free
            assert needed + len(match.blocks) > 0
            assert self.pool.free == before
            return
        self.pool.hold(match.blocks)
        blocks = [*match.blocks, *self.pool.take(needed)]
        node = match.node
        for at in range(len(match.blocks), len(tokens) // SIZE):
            node = self.pool.seal(blocks[at], node, tokens[at * SIZE : (at + 1) * SIZE])
        self.held.append((blocks, tokens))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        blocks, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)

    @invariant()
    def blocks_are_neither_lost_nor_doubled(self) -> None:
        if not hasattr(self, "pool"):
            return
        in_use = {block for blocks, _ in self.held for block in blocks}
        assert self.pool.free == self.pool.count - len(in_use)

    @invariant()
    def a_match_holds_exactly_the_tokens_asked_for(self) -> None:
        if not hasattr(self, "pool"):
            return
        content: dict[int, tuple[int, ...]] = {}
        for blocks, tokens in self.held:
            for at in range(len(tokens) // SIZE):
                piece = tuple(tokens[at * SIZE : (at + 1) * SIZE])
                assert content.setdefault(blocks[at], piece) == piece
        for _, tokens in self.held:
            match = self.pool.match(tokens)
            for at, block in enumerate(match.blocks):
                if block in content:
                    assert content[block] == tuple(tokens[at * SIZE : (at + 1) * SIZE])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
