"""A GGUF model in llama.cpp, and a context that computes with it."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.worker_service.engine.interface import EngineUnusable
from penstock.worker_service.engine.llamacpp import binding

MAX_SEQUENCES = 256
"""Of a context: LLAMA_MAX_SEQ."""
CELLS = 256
"""llama.cpp's KV caches have a multiple of so many cells."""
READ = 0
"""A load mode. A mapped file would stay in memory in addition to the copies that CPUs compute with."""


class LlamaModel:
    """The weights of a GGUF file, in memory. Freed with the last reference."""

    def __init__(
        self, file: Path, library: str = "", *, gpu: bool = False, progress: Callable[[float], None] = lambda _: None
    ) -> None:
        """library: a file of llama.cpp's library; empty: that of the package. gpu: put all layers on the GPUs. progress: told
        the share that is loaded.

        Raises:
            EngineUnusable: There is no library of the right version, or it cannot serve this model.
        """
        try:
            self.api = api = binding.load_library(binding.library_path(library))
        except binding.LibraryUnusable as error:
            raise EngineUnusable(str(error)) from None
        if gpu and not api.llama_supports_gpu_offload():
            raise EngineUnusable("device: this build of llama.cpp has no GPU: name one in llamacpp.library")
        params = api.llama_model_default_params()
        params.n_gpu_layers = -1 if gpu else 0
        if not gpu:
            params.load_mode = READ

        def goes_on(share: float, _: object) -> bool:
            progress(share)
            return True

        callback = binding.ProgressCallback(goes_on)  # kept until the model is loaded
        params.progress_callback = ctypes.cast(callback, ctypes.c_void_p)
        self.handle = api.llama_model_load_from_file(str(file).encode(), params)
        if not self.handle:
            raise EngineUnusable(f"{file}: llama.cpp cannot load it: {binding.logged_error()}")
        if unsuited := self._unsuited():
            raise EngineUnusable(f"{file}: the model {unsuited}: serve it by llama.cpp's server, as engine: openai")
        self.vocab_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.handle)))
        self.context_tokens = int(api.llama_model_n_ctx_train(self.handle))
        self.parameters = int(api.llama_model_n_params(self.handle))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.api.llama_model_free(self.handle)

    def _unsuited(self) -> str:
        """Why the state of a sequence cannot be cut back to a position, nor shared up to one; empty if it can."""
        api, model = self.api, self.handle
        if api.llama_model_has_encoder(model) or not api.llama_model_has_decoder(model):
            return "has an encoder"
        if api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model):
            return "has recurrent layers"
        return "generates by diffusion" if api.llama_model_is_diffusion(model) else ""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one sequence from position `start` on; the last `logits` of them have logits."""

    tokens: Sequence[int]
    start: int
    sequence: int
    logits: int


class LlamaContext:
    """A KV cache of `cells` tokens with up to `sequences` sequences, and what computes with it. One thread at a time."""

    def __init__(self, model: LlamaModel, cells: int, sequences: int, *, batch: int, threads: int = 1) -> None:
        """batch: tokens of one call, about.

        Raises:
            EngineUnusable: There is not enough memory.
        """
        self._model, self._api = model, model.api
        batch = max(batch, sequences)  # llama.cpp ends the process where it may have fewer outputs than sequences
        params = model.api.llama_context_default_params()
        params.n_ctx = -(-cells // CELLS) * CELLS
        params.n_batch, params.n_ubatch = batch, min(batch, params.n_ubatch)
        params.n_seq_max, params.kv_unified = sequences, True
        params.n_outputs_max = params.n_outputs_max_per_seq = batch
        params.n_threads = params.n_threads_batch = threads
        self._handle = model.api.llama_init_from_model(model.handle, params)
        if not self._handle:
            problem = f"kv_tokens: llama.cpp has no room for {params.n_ctx} tokens"
            raise EngineUnusable(f"{problem}: {binding.logged_error()}")
        self._memory = self._api.llama_get_memory(self._handle)
        self.batch_tokens = batch
        self._token, self._position, self._sequence = (np.zeros(batch, np.int32) for _ in range(3))
        self._logits, ones = np.zeros(batch, np.int8), np.ones(batch, np.int32)
        places = (np.arange(batch, dtype=np.uint64) * 4 + self._sequence.ctypes.data).astype(np.uint64)
        self._kept = (ones, places)  # what the batch points to
        self._batch = binding.Batch(
            0,
            self._token.ctypes.data_as(ctypes.POINTER(binding.Token)),
            None,
            self._position.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            places.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._api.llama_free(self._handle)

    def decode(self, parts: Sequence["Part"]) -> npt.NDArray[np.float32]:
        """Compute up to `batch` tokens; (those with logits, V) logits, valid until the next call.

        Raises:
            RuntimeError: llama.cpp cannot; some tokens may have been computed.
        """
        count = 0
        for part in parts:
            end = count + len(part.tokens)
            self._token[count:end] = part.tokens
            self._position[count:end] = range(part.start, part.start + end - count)
            self._sequence[count:end] = part.sequence
            self._logits[count:end] = 0
            self._logits[end - part.logits : end] = 1
            count = end
        self._batch.n_tokens = count
        failed = self._api.llama_decode(self._handle, self._batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        shape = sum(part.logits for part in parts), self._model.vocab_size
        if not shape[0]:
            return np.empty(shape, np.float32)
        return np.ctypeslib.as_array(self._api.llama_get_logits(self._handle), shape)

    def cut(self, sequence: int, first: int, end: int = -1) -> None:
        """Remove the tokens from position `first` to before `end`; -1: to the last one."""
        if not self._api.llama_memory_seq_rm(self._memory, sequence, first, end):
            raise RuntimeError(f"llama.cpp cannot remove tokens {first} to {end} of a sequence")

    def share(self, source: int, target: int, first: int, end: int) -> None:
        """Make a sequence's tokens from position `first` to before `end` those of another one, too."""
        self._api.llama_memory_seq_cp(self._memory, source, target, first, end)

    def state_bytes(self, sequence: int) -> int:
        return int(self._api.llama_state_seq_get_size(self._handle, sequence))

    def save(self, sequence: int, out: npt.NDArray[np.uint8]) -> None:
        """Write a sequence's state into `out`, which is long enough."""
        if not self._api.llama_state_seq_get_data(self._handle, _pointer(out), out.nbytes, sequence):
            raise RuntimeError("llama.cpp cannot copy a sequence's state")

    def load(self, sequence: int, data: npt.NDArray[np.uint8]) -> None:
        """Replace a sequence by a state of the same model and version; `data` may be longer."""
        if not self._api.llama_state_seq_set_data(self._handle, _pointer(data), data.nbytes, sequence):
            raise RuntimeError("llama.cpp cannot restore a sequence's state")


def _pointer(data: npt.NDArray[np.uint8]) -> "ctypes._Pointer[ctypes.c_uint8]":
    return ctypes.cast(data.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
