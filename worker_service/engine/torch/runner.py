"""Runs steps of a transformers model over paged KV."""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from worker_service.engine.interface import KvLayout
from worker_service.engine.runner import RawLogprobs, Row, RowResult
from worker_service.engine.torch import sampling
from worker_service.engine.torch.attention import (
    KERNEL_DTYPES,
    KernelThreads,
    KvPool,
    PagedBatch,
    numbers,
)
from worker_service.engine.torch.compiled_draft import CompiledDraft
from worker_service.engine.torch.compiled_forward import CompiledForward, can_compile
from worker_service.engine.torch.forward import Forward, FusedForward, can_fuse
from worker_service.engine.torch.kernels import I64
from worker_service.engine.torch.plain_model import CausalModel, PlainModel
from worker_service.engine.torch.step_layout import Segment, step_layout
from worker_service.engine.torch.uploads import uploaded

_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def kv_layout(model: CausalModel, block_tokens: int, model_digest: str) -> KvLayout:
    """The layout of a model's KV."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = _DTYPE_NAMES[model.dtype]
    return KvLayout(model_digest, config.num_hidden_layers, config.num_key_value_heads, head_dim, block_tokens, dtype)


def _through_modules(model: CausalModel) -> Forward:
    from worker_service.engine.torch.module_forward import ModuleForward  # seconds of imports

    assert not isinstance(model, PlainModel)  # which is always fused
    return ModuleForward(model)


class TorchRunner:
    """A ModelRunner on CPU or CUDA."""

    def __init__(
        self,
        model: CausalModel,
        blocks: int,
        layout: KvLayout,
        *,
        threads: int = 1,
        kernel: bool | None = None,
        fused: bool | None = None,
        compiled: bool | None = None,
    ) -> None:
        """Take over the model, whose weights may be fused.

        threads: of the compiled CPU kernel. kernel: whether to use it; None: depends on device and dtype. fused: whether to
        use the fused forward pass; None: if the model has one. compiled: whether the whole pass is compiled, which needs the
        kernel and a model that has a fused pass; None: with one thread, if it suits the model.
        """
        device = model.device
        self._model, self._device = model, device
        self.kv_layout = layout
        self._pool = KvPool(
            layout.layers, blocks, layout.block_tokens, layout.kv_heads, layout.head_dim, model.dtype, str(device)
        )
        if kernel is None:
            kernel = device.type == "cpu" and model.dtype in KERNEL_DTYPES
        if fused is None:
            fused = can_fuse(model)
        if compiled is None:
            compiled = threads == 1 and can_compile(model)
        self._threads = KernelThreads(threads) if kernel else None
        self._compiled = CompiledForward(model, self._pool) if kernel and fused and compiled else None
        self._forward: Forward | None = None
        if self._compiled is None:
            exact = kernel and model.dtype == torch.float32
            self._forward = FusedForward(model, compiled=exact) if fused else _through_modules(model)

    def compiled_draft(self) -> CompiledDraft | None:
        """The compiled loop that drafts with this model, over the same pool; None without the compiled pass."""
        return CompiledDraft(self._compiled) if self._compiled is not None else None

    def run(self, rows: Seq[Row]) -> list[RowResult]:
        if self._compiled is not None:  # no parameter of a module takes part
            return self._run(rows)
        with torch.inference_mode():
            return self._run(rows)

    def _run(self, rows: Seq[Row]) -> list[RowResult]:
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
        return self._read(rows, logits)

    def _logits(self, tokens: I64, segments: list[Segment], tables: I64, logit_rows: list[int]) -> torch.Tensor:
        """(positions, V), in float32, of the tokens at `logit_rows`."""
        if self._compiled is not None:
            hidden = self._compiled(tokens, step_layout(segments, tables, self._pool.block_tokens), tables)
            return torch.from_numpy(self._compiled.logits(hidden[logit_rows]))
        assert self._forward is not None
        paged = PagedBatch(self._pool, segments, tables, self._threads)
        token_ids, positions, selected, *indices = uploaded(
            [tokens, paged.positions, np.array(logit_rows, np.int64), *paged.indices], self._device
        )
        paged.place(indices)
        states = self._forward(token_ids, positions, paged, selected if len(logit_rows) < len(tokens) else None)
        return self._model.lm_head(states).float()

    def read_blocks(self, blocks: Seq[int], out: npt.NDArray[np.generic] | None = None) -> npt.NDArray[np.generic]:
        into = None
        if out is not None:
            into = torch.from_numpy(out)
            into = into.view(torch.bfloat16) if self._model.dtype == torch.bfloat16 else into
        return numbers(self._pool.read(list(blocks), into))

    def write_blocks(self, blocks: Seq[int], data: npt.NDArray[np.generic]) -> None:
        self._pool.write(list(blocks), np.ascontiguousarray(data))

    def _read(self, rows: Seq[Row], logits: torch.Tensor) -> list[RowResult]:
        """Convert (positions, V) logits to tokens, logprobs and distributions of their rows.

        A row whose logits are not finite (bad KV from a transfer, an overflow in half precision) gets an error instead.
        """
        places = [
            sampling.Position(row.sampling, row.offset + i, row.output_before(i))
            for row in rows
            for i in range(row.logits)
        ]
        (best, finite), free = sampling.best(logits), logits
        logits = sampling.adjusted(logits, places)
        if any(row.allowed is not None for row in rows):
            logits = self._restricted(rows, logits)
        if logits is not free:
            best, still = sampling.best(logits)
            finite = [both[0] and both[1] for both in zip(finite, still, strict=True)]
        chosen = sampling.choose(logits, places, best)
        results, at = [], 0
        telling = [row for row in rows if row.logits and row.sampling.top_logprobs is not None]
        logprobs_iter = iter(self._logprobs(rows, free, chosen)) if telling else iter(())
        for row in rows:
            own = slice(at, at + row.logits)
            at += row.logits
            spread = None
            if row.distributions and row.logits:
                spread = sampling.distributions(logits[own], places[own]).cpu().numpy()
            row_logprobs = (
                [next(logprobs_iter) for _ in range(row.logits)] if row.sampling.top_logprobs is not None else []
            )
            error = None if all(finite[own]) else FloatingPointError("the model's logits are not finite")
            results.append(RowResult(chosen[own], row_logprobs, spread, error))
        return results

    @staticmethod
    def _restricted(rows: Seq[Row], logits: torch.Tensor) -> torch.Tensor:
        """The logits without the tokens that their rows do not allow."""
        places: list[int] = []
        masks, at = [], 0
        for row in rows:
            if row.allowed is not None and row.logits:
                places += range(at, at + row.logits)
                masks.append(row.allowed)
            at += row.logits
        return sampling.restricted(logits, places, np.concatenate(masks)) if places else logits

    def _logprobs(self, rows: Seq[Row], logits: torch.Tensor, chosen: list[int]) -> list[RawLogprobs]:
        picked: list[int] = []
        counts: list[int] = []
        at = 0
        for row in rows:
            if row.sampling.top_logprobs is not None:
                picked += range(at, at + row.logits)
                counts += [row.sampling.top_logprobs] * row.logits
            at += row.logits
        return sampling.logprobs(logits[picked], [chosen[i] for i in picked], counts)
