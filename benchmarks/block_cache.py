"""How much of each prompt is cached, from the ids of its blocks: a prefix cache that evicts the least recently used. No I/O.

Blocks are identified as in the Mooncake traces (Qin et al., FAST 2025): two blocks have one id if they have the same tokens
and follow the same tokens. So the blocks of a prompt that are cached can be reused up to the first that is not.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

from penstock.planner_service.simulator.workload import Ints
from penstock.services.domain.errors import invalid

BLOCK_TOKENS = 512  # of the Mooncake traces


class PrefixCache:
    """The blocks of the last prompts, as many as there is room for.

    A prompt's first block counts as used last: a block without those before it is useless, so ends are evicted first.
    """

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()  # the least recently used first

    def touch(self, prompt: Sequence[Hashable]) -> int:
        """How many of a prompt's first blocks are cached; then all of them are, as far as there is room."""
        blocks, cached = self._blocks, 0
        while cached < len(prompt) and prompt[cached] in blocks:
            cached += 1
        for block in reversed(prompt):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._most:
            blocks.popitem(last=False)
        return cached


def block_problem(blocks: int, tokens: int, block_tokens: int) -> str:
    """What is wrong with so many blocks for a prompt of so many tokens; empty if nothing is."""
    needed = -(-tokens // block_tokens)
    return "" if blocks == needed else f"{tokens} tokens are {needed} blocks of {block_tokens}, not {blocks}"


def cached_tokens(
    prompts: Sequence[Sequence[Hashable]], input_tokens: Ints, cache_tokens: int, block_tokens: int = BLOCK_TOKENS
) -> Ints:
    """(N) tokens at the beginning of each prompt that a cache of `cache_tokens` has when it comes, at most all but one.

    prompts: (N) the ids of each prompt's blocks, in order of arrival; the last one may be partial. input_tokens (N).

    One cache serves all requests: with several replicas, it is that of all together if each request goes where its prefix is.
    A prompt is cached from its arrival on, and not its answer, so far as later prompts do not repeat it as their own blocks.

    Raises:
        InvalidRequest: A prompt that has not as many blocks as its tokens need, or no room for a block.
    """
    if block_tokens < 1:
        raise invalid("block_tokens", f"must be at least 1, not {block_tokens}")
    if cache_tokens < block_tokens:
        raise invalid("cache_tokens", f"must be at least those of a block, {block_tokens}, not {cache_tokens}")
    if len(prompts) != len(input_tokens):
        raise invalid("hash_ids", f"must be of {len(input_tokens)} prompts, not {len(prompts)}")
    cache, cached = PrefixCache(cache_tokens // block_tokens), np.zeros(len(prompts), np.int64)
    for i, (prompt, tokens) in enumerate(zip(prompts, input_tokens.tolist(), strict=True)):
        if problem := block_problem(len(prompt), tokens, block_tokens):
            raise invalid(f"hash_ids[{i}]", problem)
        cached[i] = min(cache.touch(prompt) * block_tokens, tokens - 1)
    return cached
