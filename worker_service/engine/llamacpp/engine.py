"""Loads a GGUF file and creates the built-in engine for it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from penstock.services.clock import Clock, SystemClock
from penstock.services.gguf import NotGguf, read_metadata
from penstock.services.mesh_schema.common import DEFAULT_STEP_TOKENS
from penstock.worker_service.engine.assembly import EngineOptions, Memory, built_in_core, host_memory
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.digest import model_digest
from penstock.worker_service.engine.generation_config import checked_defaults
from penstock.worker_service.engine.held_tokens import OutputCoalescing
from penstock.worker_service.engine.interface import EngineInfo, EngineUnusable
from penstock.worker_service.engine.llamacpp.binding import BUILT_FOR
from penstock.worker_service.engine.llamacpp.model import MAX_SEQUENCES, LlamaModel
from penstock.worker_service.engine.llamacpp.runner import LlamaRunner
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.text.gguf import UnknownTokenizer
from penstock.worker_service.text.hf import HfTokenizer

HALF_BYTES = 2  # of an element of llama.cpp's KV cache
COPIES = 2  # of a block, at most: in the cache, and outside of it once its sequence is idle


@dataclass(frozen=True, slots=True)
class LlamaCppEngineOptions(EngineOptions):
    """folder: a GGUF file. library: of llama.cpp; empty: the one that the package xllamacpp holds. gpu: compute on GPUs."""

    library: str = ""
    gpu: bool = False


def llamacpp_engine(options: LlamaCppEngineOptions, hold: OutputCoalescing | None = None) -> LoopEngine:
    """The built-in engine. Its start() raises EngineUnusable for a file that it cannot serve."""
    return LoopEngine(lambda: llamacpp_core(options, SystemClock()), hold)


def llamacpp_core(options: LlamaCppEngineOptions, clock: Clock) -> tuple[EngineCore, EngineInfo]:
    """Load the model, which takes seconds, and create the core."""
    tokenizers = dict[str, HfTokenizer]()
    return built_in_core(options, lambda file: GgufModel(file, options, tokenizers), clock)


class GgufModel:
    """A LoadedModel in llama.cpp."""

    kind, warm_up_tokens = "llamacpp", 1  # the runner has computed a block when it was created

    def __init__(self, file: Path, options: LlamaCppEngineOptions, tokenizers: dict[str, HfTokenizer]) -> None:
        """tokenizers: of the files before this one, by what these say of tokens: models that draft often have the same.

        Raises:
            EngineUnusable: It cannot be loaded.
        """
        self._options, self.name = options, file.stem
        try:
            metadata = read_metadata(file)
        except (OSError, NotGguf) as error:
            raise EngineUnusable(str(error)) from None
        self._model = LlamaModel(file, options.library, gpu=options.gpu, progress=options.progress)
        tokens = _tokens_digest(metadata) if options.drafters else ""  # a tenth of a second
        try:
            if tokens not in tokenizers:
                tokenizers[tokens] = HfTokenizer(file, self._model.vocab_size, options.tool_format)
        except UnknownTokenizer as error:
            raise EngineUnusable(str(error)) from None
        self.tokenizer = tokenizers[tokens]
        sampling = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k"}
        values = {name: metadata.get(f"general.sampling.{key}") for name, key in sampling.items()}
        self.sampling_defaults = checked_defaults(values, str(file))
        self.digest = model_digest(file, form=BUILT_FOR)
        self.context_tokens, self.parameters = self._model.context_tokens, self._model.parameters
        self.weights_bytes = file.stat().st_size
        self.block_bytes = COPIES * _token_kv_bytes(metadata) * options.kv_block_tokens
        self.own_thread = options.threads == 1 and not options.gpu

    def memory(self) -> Memory:
        return host_memory()

    def runner(self, blocks: int) -> LlamaRunner:
        options = self._options
        return LlamaRunner(
            self._model,
            blocks,
            options.kv_block_tokens,
            self.digest,
            batch=options.max_step_tokens or DEFAULT_STEP_TOKENS,
            threads=options.threads,
            sequences=min(MAX_SEQUENCES, max(64, 2 * options.max_running)) - 1,  # each has room for its logits
        )


def _tokens_digest(metadata: dict[str, object]) -> str:
    """Equal where all that a file says of its tokens is, but for the template of chats."""
    of_tokens = {key: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    return hashlib.sha256(repr(sorted(of_tokens.items())).encode()).hexdigest()


def _token_kv_bytes(metadata: dict[str, object]) -> int:
    """KV of a token, about: every layer counts as if it had all heads."""

    def number(key: str, otherwise: int = 0) -> int:
        value = metadata.get(f"{metadata['general.architecture']}.{key}", otherwise)
        return max(map(int, value)) if isinstance(value, list) else int(str(value))

    heads = number("attention.head_count", 1)
    width = number("embedding_length") // heads
    both = number("attention.key_length", width) + number("attention.value_length", width)
    return max(1, number("block_count") * number("attention.head_count_kv", heads) * both * HALF_BYTES)
