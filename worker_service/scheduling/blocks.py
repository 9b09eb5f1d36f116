"""KV blocks and the prefix tree. No I/O.

A full block is *sealed* under the key (previous block, its tokens). The keys form trees of prefixes, one for each cache salt,
which are compared token by token, so hash collisions cannot mix prefixes. A block that is not held stays in its tree until it
is reused; the least recently used goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

Node = int | str
"""A block's place in its tree. The parent of all first blocks is the salt of their tree."""
ROOT = ""
"""Of the tree of requests without a salt."""


class OutOfBlocks(Exception):
    """More blocks were requested than are free; nothing has changed."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold the first `tokens` tokens of a prompt; `node` is the tree's node after the last of them."""

    blocks: tuple[int, ...]
    tokens: int
    node: Node


class BlockPool:
    """`count` blocks of `block_tokens` tokens each; block ids are 0 to count - 1."""

    def __init__(self, count: int, block_tokens: int, *, reuse: bool = True) -> None:
        """`reuse`: cache prefixes; otherwise every prompt is computed completely."""
        if count < 1 or block_tokens < 1:
            raise ValueError(f"blocks and tokens per block must be positive, not {count} of {block_tokens}")
        self.count, self.block_tokens, self._reuse = count, block_tokens, reuse
        self._holders = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # least recently used first
        self._tree: dict[tuple[Node, tuple[int, ...]], tuple[int, int]] = {}  # key -> (block, node)
        self._keys: list[tuple[Node, tuple[int, ...]] | None] = [None] * count
        self._nodes = 0

    @property
    def free(self) -> int:
        """Number of blocks that are not held; some may contain cached prefixes."""
        return len(self._free)

    def match(self, tokens: Seq[int], root: Node = ROOT) -> PrefixMatch:
        """The longest cached prefix of `tokens` in full blocks, in the tree of `root`. Does not hold them."""
        size, node, blocks = self.block_tokens, root, list[int]()
        for start in range(0, len(tokens) - size + 1, size) if self._reuse else ():
            entry = self._tree.get((node, tuple(tokens[start : start + size])))
            if entry is None:
                break
            blocks.append(entry[0])
            node = entry[1]
        return PrefixMatch(tuple(blocks), len(blocks) * size, node)

    def can_take(self, match: PrefixMatch, fresh: int) -> bool:
        """Whether the blocks of `match` and `fresh` new ones could be held now."""
        idle = sum(1 for block in match.blocks if self._holders[block] == 0)
        return fresh + idle <= len(self._free)

    def hold(self, blocks: Seq[int]) -> None:
        """Hold blocks of a match, or blocks that are already held, once more."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int]:
        """Hold `count` blocks with undefined content.

        Raises:
            OutOfBlocks: There are fewer; nothing has changed.
        """
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks requested, {len(self._free)} of {self.count} free")
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._unseal(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Seq[int]) -> None:
        """Release the blocks of one sequence, given in order. Their content stays cached until it is evicted."""
        for block in reversed(blocks):  # the end of a prefix is evicted before its beginning
            if self._holders[block] < 1:
                raise ValueError(f"block {block} is not held")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def seal(self, block: int, node: Node, tokens: Seq[int]) -> int:
        """Add full `block` with `tokens` after `node` to the tree; return its node.

        If another block has the same prefix, that one stays in the tree.
        """
        if len(tokens) != self.block_tokens:
            raise ValueError(f"a sealed block holds {self.block_tokens} tokens, not {len(tokens)}")
        key = (node, tuple(tokens))
        entry = self._tree.get(key)
        if entry is not None:
            return entry[1]
        self._nodes += 1
        self._tree[key] = (block, self._nodes)
        self._keys[block] = key
        return self._nodes

    def _unseal(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._tree[key]
            self._keys[block] = None
