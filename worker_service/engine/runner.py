"""The interface through which an EngineCore computes its steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.types.sampling import SamplingParams
from penstock.types.workers import KvLayout


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: compute `tokens` (from position `start` on) into `blocks`.

    sequence: its name; the rows of a step have different ones. What it had after `start` is cut off. A runner that keeps KV
        by sequence, not by block, finds it by this name, and shares what other sequences have in the same blocks.
    logits: number of last tokens that need a next token. offset: output position of the first of these.
    output: the reply's tokens up to the end of this part, if its sampling parameters penalize them; otherwise empty.
    allowed: tokens that they may be, (logits, ceil(V / 32)) bits (`worker_service.grammar.token_grammar.Mask`); None: all.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: int
    sampling: SamplingParams
    offset: int
    allowed: npt.NDArray[np.int32] | None = None
    output: Sequence[int] = ()
    sequence: str = ""

    def output_before(self, index: int) -> Sequence[int]:
        """`output` before the next token number `index` of this part."""
        return self.output[: len(self.output) - self.logits + 1 + index] if self.output else ()


@dataclass(frozen=True, slots=True)
class Draft:
    """What to draft for one sequence. tokens: known ones without KV, at least one. start: their first position.

    temperature: 0 for greedy. chances: random numbers, one for each token to draft.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    temperature: float
    top_p: float
    top_k: int
    chances: list[float]


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """The logprobs of the chosen token and of the most likely tokens at one position."""

    chosen: float
    top_ids: Sequence[int] = ()
    top: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """The next token for each position with logits; logprobs if requested.

    error: why this row has no result; other rows of the step are not affected.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[RawLogprobs] = ()
    error: BaseException | None = None


class ModelRunner(Protocol):
    """Computes steps of one model with one pool of KV blocks.

    The blocks of a row are the sequence: two rows share a prefix by naming its blocks (a copy), a row that starts earlier
    cuts its sequence off, and `read_blocks` and `write_blocks` export and import it, while other threads compute.
    """

    @property
    def kv_layout(self) -> KvLayout: ...

    def run(self, rows: Sequence[Row]) -> list[RowResult]:
        """Compute a step; one result per row.

        A step may be repeated in parts with the same rows: writing the KV of a row is idempotent.

        Raises:
            Exception: The step cannot be computed; one of its rows may be the cause.
        """

    def read_blocks(self, blocks: Sequence[int], out: npt.NDArray[np.generic] | None = None) -> npt.NDArray[np.generic]:
        """A copy of blocks: (blocks, layers, 2, elements); in `out` if it is given."""

    def write_blocks(self, blocks: Sequence[int], data: npt.NDArray[np.generic]) -> None:
        """Write blocks; `data` may be read-only."""
