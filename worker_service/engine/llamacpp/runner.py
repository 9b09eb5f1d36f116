"""Runs steps of a GGUF model by llama.cpp."""

import contextlib
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from penstock.types.workers import KvLayout
from penstock.worker_service.engine.llamacpp.model import LlamaContext, LlamaModel, Part
from penstock.worker_service.engine.llamacpp.sequences import Sequences
from penstock.worker_service.engine.logits import HostLogits
from penstock.worker_service.engine.row_results import row_results
from penstock.worker_service.engine.runner import Row, RowResult


class LlamaRunner:
    """A ModelRunner on llama.cpp.

    A block travels as llama.cpp's own state of a sequence with these tokens alone, of which the layout knows no more than its
    length.
    """

    def __init__(
        self,
        model: LlamaModel,
        blocks: int,
        block_tokens: int,
        model_digest: str,
        *,
        batch: int,
        threads: int = 1,
        sequences: int,
    ) -> None:
        """batch: tokens of most steps; larger ones are computed in parts. sequences: how many are in the cache at most.

        Raises:
            EngineUnusable: There is not enough memory.
        """
        cells = blocks * block_tokens
        self._context = LlamaContext(model, cells, sequences + 1, batch=batch, threads=threads)
        self._context.decode([Part([0] * block_tokens, 0, 0, 1)])
        half = -(-self._context.state_bytes(0) // (2 * block_tokens))
        self._context.cut(0, 0)
        self.kv_layout = KvLayout(model_digest, 1, 1, half, block_tokens, "uint8")
        self._count = sequences
        self._sequences = Sequences(self._context, sequences, block_tokens, self.kv_layout.block_bytes)
        self._next, self._using = threading.Lock(), threading.Lock()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Copies of blocks come from another thread; they wait for the end of a step, and the next step for them."""
        with self._next:
            self._using.acquire()
        try:
            yield
        finally:
            self._using.release()

    def run(self, rows: Seq[Row]) -> list[RowResult]:
        with self._turn():
            logits = self._logits(rows)
            return row_results(rows, HostLogits(logits)) if len(logits) else [RowResult()] * len(rows)

    def _logits(self, rows: Seq[Row]) -> npt.NDArray[np.float32]:
        """(positions, V) of all rows, in as few calls as their tokens and sequences take."""
        most, parts, busy, room = self._context.batch_tokens, list[Part](), set[int](), self._context.batch_tokens
        computed = list[npt.NDArray[np.float32]]()
        self._sequences.begin_step({row.sequence for row in rows}, sum(len(row.tokens) for row in rows))

        def compute() -> None:
            computed.append(self._context.decode(parts).copy())
            parts.clear()

        for row in rows:
            if parts and (len(row.tokens) > room or len(busy) == self._count):
                compute()
                busy.clear()
                room = most
            end = row.start + len(row.tokens)
            number = self._sequences.place(row.sequence, row.blocks, row.start, end, busy)
            busy.add(number)
            for first in range(0, len(row.tokens), most):
                if first:
                    compute()
                    room = most
                tokens = row.tokens[first : first + most]
                behind = len(row.tokens) - first - len(tokens)
                parts.append(Part(tokens, row.start + first, number, min(len(tokens), max(0, row.logits - behind))))
                room -= len(tokens)
        if not computed:
            return self._context.decode(parts)
        compute()
        return np.concatenate(computed)

    def read_blocks(self, blocks: Seq[int], out: npt.NDArray[np.generic] | None = None) -> npt.NDArray[np.generic]:
        if out is None:
            out = np.empty((len(blocks), 1, 2, self.kv_layout.block_bytes // 2), np.uint8)
        with self._turn():
            for block, data in zip(blocks, out.view(np.uint8), strict=True):
                self._sequences.read(block, data.reshape(-1))
        return out

    def write_blocks(self, blocks: Seq[int], data: npt.NDArray[np.generic]) -> None:
        with self._turn():
            for block, content in zip(blocks, data, strict=True):
                self._sequences.write(block, np.array(content, np.uint8).reshape(-1))
