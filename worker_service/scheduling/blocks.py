"""KV blocks: who holds which, and which hold a prefix that can be used again. No I/O.

A full block is *sealed* under the key (block before it, its own tokens). Keys therefore form a tree of prefixes, compared
token by token: two different prefixes never share a block, whatever their hashes. A block that nobody holds stays in the
tree until its room is needed; the longest unused goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

ROOT = 0  # the node before every first block


class OutOfBlocks(Exception):
    """More blocks were asked for than are free; nothing was taken."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold the first `tokens` tokens of a prompt; `node` is the tree's node behind the last of them."""

    blocks: tuple[int, ...]
    tokens: int
    node: int


class BlockPool:
    """`count` blocks of `block_tokens` tokens each; block ids are 0 to count - 1."""

    def __init__(self, count: int, block_tokens: int, *, reuse: bool = True) -> None:
        """`reuse`: prefixes are found again. Without, every prompt is computed whole."""
        if count < 1 or block_tokens < 1:
            raise ValueError(f"a pool needs blocks and blocks need tokens, not {count} of {block_tokens}")
        self.count, self.block_tokens, self._reuse = count, block_tokens, reuse
        self._holders = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # first out first
        self._tree: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> (block, node)
        self._keys: list[tuple[int, tuple[int, ...]] | None] = [None] * count
        self._nodes = ROOT

    @property
    def free(self) -> int:
        """Blocks that nobody holds; some may hold prefixes."""
        return len(self._free)

    def match(self, tokens: Seq[int]) -> PrefixMatch:
        """The longest known prefix of `tokens`, in whole blocks. Takes nothing."""
        size, node, blocks = self.block_tokens, ROOT, list[int]()
        for start in range(0, len(tokens) - size + 1, size) if self._reuse else ():
            found = self._tree.get((node, tuple(tokens[start : start + size])))
            if found is None:
                break
            blocks.append(found[0])
            node = found[1]
        return PrefixMatch(tuple(blocks), len(blocks) * size, node)

    def shortened(self, match: PrefixMatch, tokens: Seq[int], most_tokens: int) -> PrefixMatch:
        """`match`, cut to at most `most_tokens` tokens: the last token of a prompt is always computed."""
        if match.tokens <= most_tokens:
            return match
        return self.match(tokens[:most_tokens])

    def can_take(self, match: PrefixMatch, fresh: int) -> bool:
        """Whether the blocks of `match` and `fresh` new ones could be held now."""
        idle = sum(1 for block in match.blocks if self._holders[block] == 0)
        return fresh + idle <= len(self._free)

    def hold(self, blocks: Seq[int]) -> None:
        """Hold blocks of a match made just now, or blocks that somebody holds, once more."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int]:
        """Hold `count` blocks of unspecified content. OutOfBlocks, and nothing taken, if there are fewer."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} of {self.count} free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._unseal(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Seq[int]) -> None:
        """Let go of blocks held in this order by one sequence; their content stays findable while there is room."""
        for block in reversed(blocks):  # the end of a prefix is forgotten before its beginning
            if self._holders[block] < 1:
                raise ValueError(f"block {block} is not held")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def seal(self, block: int, node: int, tokens: Seq[int]) -> int:
        """Full `block` holds `tokens` behind `node`; return the node behind it.

        Where the same prefix is known from another block, that one stays the one that is found.
        """
        if len(tokens) != self.block_tokens:
            raise ValueError(f"a sealed block holds {self.block_tokens} tokens, not {len(tokens)}")
        key = (node, tuple(tokens))
        known = self._tree.get(key)
        if known is not None:
            return known[1]
        self._nodes += 1
        self._tree[key] = (block, self._nodes)
        self._keys[block] = key
        return self._nodes

    def _unseal(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._tree[key]
            self._keys[block] = None
