"""What an EngineCore has compute its steps."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.domain.requests import SamplingParams
from worker_service.engine.interface import KvLayout


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: compute `tokens` (from position `start` on) into `blocks`.

    logits: the last so many tokens want a next token each. offset: output position of the first of these.
    distributions: they also want the distribution they are drawn from.
    allowed: which tokens they may be, (logits, ceil(V / 32)) bits (`worker_service.grammar.token_grammar.Mask`); None: any.
    """

    tokens: Seq[int]
    start: int
    blocks: Seq[int]
    logits: int
    sampling: SamplingParams
    offset: int
    distributions: bool = False
    allowed: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """At one position: the chosen token's logprob, and the likeliest tokens with theirs."""

    chosen: float
    top_ids: Seq[int] = ()
    top: Seq[float] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """Per position that wanted logits: the next token; logprobs where asked for; distributions (positions, V) likewise.

    error: why this row, and no other row of the step, has no result.
    """

    tokens: Seq[int] = ()
    logprobs: Seq[RawLogprobs] = ()
    distributions: npt.NDArray[np.float32] | None = None
    error: Exception | None = None


class ModelRunner(Protocol):
    """Runs steps of one model over one pool of KV blocks."""

    @property
    def kv_layout(self) -> KvLayout: ...

    def run(self, rows: Seq[Row]) -> list[RowResult]:
        """Compute a step; one result per row.

        A step may be computed again in parts, with the same rows: writing a row's KV twice changes nothing.

        Raises:
            Exception: the step cannot be computed; one of its rows may be the cause.
        """
        ...

    def read_blocks(self, blocks: Seq[int]) -> npt.NDArray[np.generic]:
        """A copy of blocks: (blocks, layers, 2, block_tokens, kv_heads, head_dim)."""
        ...

    def write_blocks(self, blocks: Seq[int], data: npt.NDArray[np.generic]) -> None: ...
