"""The block pool: no block is ever held twice by accident, lost, or found under another prefix."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.worker_service.scheduling.blocks import ROOT, BlockPool, Node, OutOfBlocks

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
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("count", "tokens"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_has_blocks(count: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        BlockPool(count, tokens)


def test_without_reuse_nothing_is_cached() -> None:
    pool = BlockPool(2, 2, reuse=False)
    (block,) = pool.take(1)
    pool.seal(block, ROOT, [1, 2])
    assert pool.match([1, 2]).blocks == ()


def test_a_block_is_released_as_often_as_it_is_held() -> None:
    """And no more: a block released twice would be given to two requests."""
    pool = BlockPool(2, 2)
    (block,) = pool.take(1)
    pool.hold([block])
    pool.release([block])
    assert pool.free == 1
    pool.release([block])
    assert pool.free == 2
    with pytest.raises(ValueError, match=f"block {block} is not held"):
        pool.release([block])


def test_blocks_without_a_prefix_are_reused_first() -> None:
    """A released block that is not cached is worth nothing, so cached prefixes outlive it, whatever the order."""
    pool = BlockPool(3, 2)
    first, second, third = pool.take(3)
    pool.seal(first, ROOT, [1, 2])
    pool.release([first])
    pool.release([second])
    pool.release([third])
    assert set(pool.take(2)) == {second, third}
    assert pool.match([1, 2]).blocks == (first,)


@given(st.permutations(range(4)))
def test_the_least_recently_used_prefix_is_evicted_first(order: list[int]) -> None:
    pool = BlockPool(4, 1)
    blocks = pool.take(4)
    for token, block in enumerate(blocks):
        pool.seal(block, ROOT, [token])
    for token in order:
        pool.release([blocks[token]])
    for evicted in range(1, 5):
        pool.take(1)
        cached = {token for token in range(4) if pool.match([token]).blocks}
        assert cached == set(order[evicted:])


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], []])
def test_only_full_blocks_are_sealed(tokens: list[int]) -> None:
    pool = BlockPool(2, 2)
    (block,) = pool.take(1)
    with pytest.raises(ValueError, match="a sealed block holds 2 tokens"):
        pool.seal(block, ROOT, tokens)
    assert pool.match([1, 2]).blocks == ()


def test_equal_prefixes_are_one_node_and_others_are_not() -> None:
    """The second block of an equal prefix is not cached: the first one serves both. What follows differs by its parent."""
    pool = BlockPool(5, 1)
    first, same, other, below, beneath = pool.take(5)
    node = pool.seal(first, ROOT, [1])
    assert pool.seal(same, ROOT, [1]) == node
    assert pool.match([1]).blocks == (first,)
    another = pool.seal(other, ROOT, [2])
    assert len({ROOT, node, another}) == 3
    pool.seal(below, node, [9])
    pool.seal(beneath, another, [9])
    assert pool.match([1, 9]).blocks == (first, below)
    assert pool.match([2, 9]).blocks == (other, beneath)
    pool.release([same])
    assert pool.match([1]).blocks == (first,)


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "1"]), st.lists(st.integers(0, 1), min_size=3, max_size=3)),
        max_size=12,
    )
)
def test_a_block_is_found_under_its_salt_only(sealed: list[tuple[str, list[int]]]) -> None:
    """Whatever was sealed: what a salt finds is what was sealed with it, however alike the tokens are."""
    pool = BlockPool(64, 1)
    for salt, tokens in sealed:
        node: Node = salt
        for block, token in zip(pool.take(len(tokens)), tokens, strict=True):
            node = pool.seal(block, node, [token])
    for salt in ("", "a", "b", "1"):
        known = [tokens for own, tokens in sealed if own == salt]
        for tokens in ([a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)):
            longest = max((sum(1 for n in (1, 2, 3) if tokens[:n] == one[:n]) for one in known), default=0)
            assert pool.match(tokens, salt).tokens == longest
