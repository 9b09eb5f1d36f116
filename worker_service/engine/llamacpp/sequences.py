"""Which sequence of llama.cpp's KV cache holds which blocks.

The engine counts KV in blocks and shares prefixes by them. llama.cpp's cache has cells, each of a position and of one or
more sequences. Here a block is the cells of its positions: every sequence that a row names gets a number, its blocks that
others have computed become its own too, without a copy, and a block that is written again loses its old cells. So there are
never more cells in use than the engine has blocks for.

llama.cpp has a few hundred numbers. What a sequence loses that no other one has, and may still be wanted, is saved outside
the cache, and loaded when a row names it again; so are blocks that arrive from another engine.

llama.cpp goes through all cells in use for every token, whosever they are: with 7,000 cells of replies that have ended, a
prompt of 384 tokens takes 1.35 times as long, a step of eight replies 1.18 times; in a worker whose last eight replies had
48 tokens each, a prompt takes 1.035 times as long (Qwen2.5 0.5B, one core). So a sequence that no row has named for some
tokens is saved as well, a few blocks at a time, before a long step more.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.worker_service.engine.llamacpp.model import LlamaContext

Data = npt.NDArray[np.uint8]

IDLE_TOKENS = 128
"""A sequence leaves the cache once so many tokens are computed without it."""
SAVED_BLOCKS, TOKENS_PER_SAVED = 8, 4
"""Of one step, so many or a block for so many of its tokens: each takes some tenths of a millisecond."""


@dataclass(slots=True)
class _Slot:
    """One of llama.cpp's sequences: its blocks by place, None for one that it has lost, and its number of tokens."""

    table: list[int | None] = field(default_factory=list)
    tokens: int = 0
    name: str | None = None
    used: int = 0  # the tokens that were computed when a step last named it


class Sequences:
    """The sequences of one context. Not thread-safe."""

    def __init__(self, context: LlamaContext, count: int, block_tokens: int, block_bytes: int) -> None:
        """count: numbers for sequences; the context needs one more. block_bytes: of what a block holds, outside the cache."""
        self._context, self._size, self._block_bytes = context, block_tokens, block_bytes
        self._slots = [_Slot() for _ in range(count)]
        self._spare = count
        self._named: dict[str, int] = {}
        self._owners: dict[int, set[int]] = {}  # by block
        self._saved: dict[int, Data] = {}  # by block
        self._computed = 0

    def begin_step(self, names: Collection[str], tokens: int) -> None:
        """A step begins that computes so many tokens of these sequences."""
        self._computed += tokens
        room, latest = max(SAVED_BLOCKS, tokens // TOKENS_PER_SAVED), self._computed - IDLE_TOKENS
        idle = [(s.used, n) for n, s in enumerate(self._slots) if s.table and s.used <= latest and s.name not in names]
        for _, number in sorted(idle):
            if room > 0:
                blocks = len(self._slots[number].table)
                self._shorten(number, max(0, blocks - room) * self._size)
                room -= blocks

    def place(self, name: str, blocks: Sequence[int], start: int, end: int, busy: set[int]) -> int:
        """The number of a sequence that gets the tokens from `start` to before `end`, in `blocks`. It then has those before
        `start`, and nothing behind them.

        busy: numbers of the other sequences of this step. Tokens whose computation fails are placed again.

        Raises:
            ValueError: A block of the tokens before `start` holds nothing.
        """
        remaining = list(blocks[: -(-start // self._size)])
        number = self._named.get(name)
        if number is None or self._slots[number].table[: len(remaining)] != remaining:
            number = self._begin(name, remaining, busy)
        slot = self._slots[number]
        slot.used = self._computed
        if slot.tokens > start:
            self._shorten(number, start)
        for place in range(start // self._size, -(-end // self._size)):
            self._write(number, place, blocks[place])
        slot.tokens = end
        return number

    def read(self, block: int, out: Data) -> None:
        """Copy what a block holds. One that holds nothing gives another one's content, which takes as long."""
        if block in self._saved:
            out[:] = self._saved[block]
            return
        owners = self._owners.get(block) or next(iter(self._owners.values()), None)
        if owners is None:
            out[:] = 0
            return
        number = next(iter(owners))
        table = self._slots[number].table
        known = block if block in self._owners else next(b for b in table if b is not None)
        self._export(number, table.index(known), out)

    def write(self, block: int, data: Data) -> None:
        """Have a block hold this content, which `read` gave in an engine of the same model."""
        for number in list(self._owners.get(block, ())):
            self._lose(number, block)
        self._saved[block] = data

    def _begin(self, name: str, table: Sequence[int], busy: set[int]) -> int:
        """Give a sequence a number and the blocks that others have computed."""
        old = self._named.pop(name, None)
        if old is not None:
            self._slots[old].name = None
        number = self._free_number(busy)
        slot, size, spare = self._slots[number], self._size, self._spare
        try:
            for place, block in enumerate(table):
                first, end = place * size, (place + 1) * size
                if (data := self._saved.get(block)) is not None:
                    self._context.load(spare, data)
                    self._context.share(spare, number, first, end)
                    self._context.cut(spare, 0)
                    del self._saved[block]
                elif owners := self._owners.get(block):
                    self._context.share(next(iter(owners)), number, first, end)
                else:
                    raise ValueError(f"block {block} holds no KV")
                slot.table.append(block)
                slot.tokens = end
                self._owners.setdefault(block, set()).add(number)
        except BaseException:
            self._shorten(number, 0)
            raise
        slot.name = name
        self._named[name] = number
        return number

    def _free_number(self, busy: set[int]) -> int:
        """An unused number, else that of the sequence that was used least recently."""
        able = (number for number in range(len(self._slots)) if number not in busy)
        number = min(able, key=lambda number: (bool(self._slots[number].table), self._slots[number].used))
        slot = self._slots[number]
        if slot.name is not None:
            del self._named[slot.name]
            slot.name = None
        self._shorten(number, 0)
        return number

    def _shorten(self, number: int, tokens: int) -> None:
        """Cut a sequence off. Its blocks after that are saved, unless another sequence has them."""
        slot, remaining = self._slots[number], -(-tokens // self._size)
        for place, block in enumerate(slot.table[remaining:], remaining):
            if block is None:
                continue
            owners = self._owners[block]
            if len(owners) == 1:
                self._saved[block] = data = np.zeros(self._block_bytes, np.uint8)
                self._export(number, place, data)
                del self._owners[block]
            else:
                owners.remove(number)
        del slot.table[remaining:]
        slot.tokens = tokens
        self._context.cut(number, tokens)

    def _write(self, number: int, place: int, block: int) -> None:
        """A sequence writes into a block: no other sequence has it from now on, nor what it held before."""
        self._saved.pop(block, None)
        owners = self._owners.setdefault(block, set())
        if owners != {number}:
            for other in owners - {number}:
                self._lose(other, block)
            self._owners[block] = {number}
        table = self._slots[number].table
        if place == len(table):
            table.append(block)

    def _lose(self, number: int, block: int) -> None:
        slot = self._slots[number]
        place = slot.table.index(block)
        self._context.cut(number, place * self._size, (place + 1) * self._size)
        slot.table[place] = None
        self._owners[block].discard(number)
        if not self._owners[block]:
            del self._owners[block]
        if not any(b is not None for b in slot.table):
            slot.table, slot.tokens = [], 0

    def _export(self, number: int, place: int, out: Data) -> None:
        context, spare = self._context, self._spare
        context.share(number, spare, place * self._size, (place + 1) * self._size)
        try:
            context.save(spare, out)
        finally:
            context.cut(spare, 0)
