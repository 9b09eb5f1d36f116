"""Where the tokens of a step are: in their sequences, and in the pool of KV blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.services.compilation import compiled
from penstock.worker_service.engine.torch.kernels import I64

RUN_TOKENS = 8
"""Tokens of a sequence for which the attention kernel reads its keys and values once."""


@dataclass(slots=True)
class Segment:
    """Tokens of one sequence in a step: rows `first` to `first + count` of the ragged batch, positions from `start` on."""

    first: int
    count: int
    start: int
    table: int


class StepLayout(NamedTuple):
    """Of N tokens, those of a sequence after each other.

    positions: (N) in their sequences. table_of: (N) the rows of the block tables. slots: (N) in the pool. runs: where the
    runs of neighbours that read their KV together begin, then their end.
    """

    positions: I64
    table_of: I64
    slots: I64
    runs: I64


def step_layout(segments: Sequence[Segment], tables: I64, block_tokens: int) -> StepLayout:
    """tables: the block tables (rows, most blocks) that the segments name."""
    counted = np.array([(s.count, s.start, s.table) for s in segments], np.int64).reshape(-1, 3)
    return StepLayout(*_layout(counted, tables, block_tokens))


@compiled()
def _layout(segments: I64, tables: I64, block_tokens: int) -> tuple[I64, I64, I64, I64]:
    """One function, as a step of a small model takes no longer than ten calls of numpy.

    segments: (S, 3): how many tokens each has, the position of the first, and the row of its block table.
    """
    tokens = runs = 0
    for s in range(len(segments)):
        tokens += segments[s, 0]
        runs += -(-segments[s, 0] // RUN_TOKENS)
    positions, table_of, slots = np.empty(tokens, np.int64), np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    starts = np.empty(runs + 1, np.int64)
    n = run = 0
    for s in range(len(segments)):
        count, start, row = segments[s]
        for i in range(count):
            if i % RUN_TOKENS == 0:
                starts[run] = n
                run += 1
            position = start + i
            positions[n], table_of[n] = position, row
            slots[n] = tables[row, position // block_tokens] * block_tokens + position % block_tokens
            n += 1
    starts[run] = n
    return positions, table_of, slots, starts
