"""Runs steps of a transformers model over paged KV."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.types.workers import KvLayout
from penstock.worker_service.engine.logits import HostLogits, Logits
from penstock.worker_service.engine.row_results import row_results
from penstock.worker_service.engine.runner import Row, RowResult
from penstock.worker_service.engine.torch.attention import KERNEL_DTYPES, KernelThreads, KvPool, PagedBatch, numbers
from penstock.worker_service.engine.torch.compiled_draft import CompiledDraft
from penstock.worker_service.engine.torch.compiled_forward import CompiledForward, can_compile
from penstock.worker_service.engine.torch.device_logits import DeviceLogits
from penstock.worker_service.engine.torch.forward import FusedForward
from penstock.worker_service.engine.torch.kernels import I64
from penstock.worker_service.engine.torch.plain_model import CausalModel
from penstock.worker_service.engine.torch.step_layout import Segment, step_layout

_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def kv_layout(model: CausalModel, block_tokens: int, model_digest: str) -> KvLayout:
    """The layout of a model's KV."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = _DTYPE_NAMES[model.dtype]
    return KvLayout(model_digest, config.num_hidden_layers, config.num_key_value_heads, head_dim, block_tokens, dtype)


class TorchRunner:
    """A ModelRunner on CPU or CUDA."""

    def __init__(
        self,
        model: CausalModel,
        blocks: int,
        layout: KvLayout,
        *,
        threads: int = 1,
        kernel: bool = True,
        compiled: bool = True,
    ) -> None:
        """Take over the model, whose weights are fused.

        threads: of the compiled CPU kernel. kernel: use it where device and dtype allow it. compiled: compile the whole pass
        where the kernel is used, with one thread, if it suits the model.
        """
        device = model.device
        self._model, self._device = model, device
        self.kv_layout = layout
        self._pool = KvPool(
            layout.layers, blocks, layout.block_tokens, layout.kv_heads, layout.head_dim, model.dtype, str(device)
        )
        kernel = kernel and device.type == "cpu" and model.dtype in KERNEL_DTYPES
        compiled = compiled and kernel and threads == 1 and can_compile(model)
        self._threads = KernelThreads(threads) if kernel else None
        self._compiled = CompiledForward(model, self._pool) if compiled else None
        self._forward: FusedForward | None = None
        if self._compiled is None:
            self._forward = FusedForward(model, compiled=kernel and model.dtype == torch.float32)

    def compiled_draft(self) -> CompiledDraft | None:
        """The compiled loop that drafts with this model, over the same pool; None without the compiled pass."""
        return CompiledDraft(self._compiled) if self._compiled is not None else None

    def run(self, rows: Sequence[Row]) -> list[RowResult]:
        if self._compiled is not None:  # no parameter of a module takes part
            return self._run(rows)
        with torch.inference_mode():
            return self._run(rows)

    def _run(self, rows: Sequence[Row]) -> list[RowResult]:
        size = self._pool.block_tokens
        tokens: list[int] = []
        segments: list[Segment] = []
        logit_rows: list[int] = []
        width = max(-(-(row.start + len(row.tokens)) // size) for row in rows)
        tables = np.zeros((len(rows), width), np.int64)
        for i, row in enumerate(rows):
            count = len(row.tokens)
            segments.append(Segment(len(tokens), count, row.start, i))
            logit_rows += range(len(tokens) + count - row.logits, len(tokens) + count)
            tokens += row.tokens
            used = -(-(row.start + count) // size)
            tables[i, :used] = row.blocks[:used]
        logits = self._logits(np.array(tokens), segments, tables, logit_rows)
        if not logit_rows:
            return [RowResult()] * len(rows)
        return row_results(rows, logits)

    def _logits(self, tokens: I64, segments: list[Segment], tables: I64, logit_rows: list[int]) -> Logits:
        """(positions, V), in float32, of the tokens at `logit_rows`."""
        if self._compiled is not None:
            hidden = self._compiled(tokens, step_layout(segments, tables, self._pool.block_tokens), tables)
            return HostLogits(self._compiled.logits(hidden[logit_rows]))
        assert self._forward is not None
        paged = PagedBatch(self._pool, segments, tables, self._threads)
        token_ids, positions, selected, *indices = (
            torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
            for array in (tokens, paged.positions, np.array(logit_rows, np.int64), *paged.indices)
        )
        paged.place(indices)
        states = self._forward(token_ids, positions, paged, selected if len(logit_rows) < len(tokens) else None)
        logits = self._model.lm_head(states).float()
        return HostLogits(logits.numpy()) if self._device.type == "cpu" else DeviceLogits(logits)

    def read_blocks(self, blocks: Sequence[int], out: npt.NDArray[np.generic] | None = None) -> npt.NDArray[np.generic]:
        into = None
        if out is not None:
            into = torch.from_numpy(out)
            into = into.view(torch.bfloat16) if self._model.dtype == torch.bfloat16 else into
        return numbers(self._pool.read(list(blocks), into))

    def write_blocks(self, blocks: Sequence[int], data: npt.NDArray[np.generic]) -> None:
        self._pool.write(list(blocks), np.ascontiguousarray(data))
