"""Loads a model folder and creates the built-in engine for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from penstock.services.clock import Clock, SystemClock
from penstock.worker_service.engine.assembly import EngineOptions, Memory, built_in_core, host_memory
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.digest import model_digest
from penstock.worker_service.engine.generation_config import sampling_defaults
from penstock.worker_service.engine.held_tokens import OutputCoalescing
from penstock.worker_service.engine.interface import EngineInfo, EngineUnusable
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.engine.torch import plain_model
from penstock.worker_service.engine.torch.attention import KERNEL_TOKENS
from penstock.worker_service.engine.torch.plain_model import CausalModel
from penstock.worker_service.engine.torch.runner import TorchRunner, kv_layout
from penstock.worker_service.engine.torch.supported import dtype_on, unsupported
from penstock.worker_service.text.hf import HfTokenizer


@dataclass(frozen=True, slots=True)
class TorchEngineOptions(EngineOptions):
    """folder: a model in Hugging Face format. kernel, compiled: as in TorchRunner."""

    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kernel: bool = True
    compiled: bool = True


def torch_engine(options: TorchEngineOptions, hold: OutputCoalescing | None = None) -> LoopEngine:
    """The built-in engine. Its start() raises EngineUnusable for a folder that it cannot serve."""
    return LoopEngine(lambda: torch_core(options, SystemClock()), hold)


def torch_core(options: TorchEngineOptions, clock: Clock) -> tuple[EngineCore, EngineInfo]:
    """Load the model, which takes seconds, and create the core."""
    torch.set_num_threads(options.threads)
    return built_in_core(options, lambda folder: TorchModel(folder, options), clock)


class TorchModel:
    """A LoadedModel on torch."""

    kind, warm_up_tokens = "torch", 2 * KERNEL_TOKENS  # long enough for torch's attention where that is used

    def __init__(self, folder: Path, options: TorchEngineOptions) -> None:
        """Raises:
        EngineUnusable: It cannot be loaded.
        """
        self._options, self.name = options, folder.name
        self._model = model = load_model(folder, options)
        self.sampling_defaults = sampling_defaults(folder)
        self.tokenizer = HfTokenizer(folder, model.config.vocab_size, options.tool_format)
        self.digest = model_digest(folder)
        self.layout = kv_layout(model, options.kv_block_tokens, self.digest)
        self.block_bytes, self.context_tokens = self.layout.block_bytes, int(model.config.max_position_embeddings)
        self.parameters = int(model.num_parameters())
        self.weights_bytes = self.parameters * model.dtype.itemsize
        self.own_thread = options.threads == 1 and model.device.type == "cpu"

    def memory(self) -> Memory:
        device = self._model.device
        return Memory(torch.cuda.mem_get_info(device)[0], shared=False) if device.type == "cuda" else host_memory()

    def runner(self, blocks: int) -> TorchRunner:
        options = self._options
        try:
            threads, kernel, compiled = options.threads, options.kernel, options.compiled
            return TorchRunner(self._model, blocks, self.layout, threads=threads, kernel=kernel, compiled=compiled)
        except RuntimeError as error:  # not enough memory
            room = blocks * options.kv_block_tokens
            problem = f"kv_tokens: {self.name}: not enough memory for {room}: {_first_line(error)}"
            raise EngineUnusable(problem) from error


def load_model(folder: Path, options: TorchEngineOptions) -> CausalModel:
    """Load a model to the engine's device.

    Raises:
        EngineUnusable: It cannot be loaded, or the device cannot hold it.
    """
    if problem := unsupported(folder):
        raise EngineUnusable(problem)
    config, dtype = plain_model.read_config(folder), dtype_on(options.device, options.dtype, folder)
    model: CausalModel
    try:
        if config is not None:
            model = plain_model.read_model(folder, config, dtype, options.progress)
        else:
            from transformers import AutoModelForCausalLM  # seconds of imports

            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineUnusable(f"{folder}: {error}") from error
    try:
        return model.eval().to(options.device)
    except (RuntimeError, AssertionError) as error:  # no such device, no CUDA, or not enough memory for the weights
        raise EngineUnusable(f"device {options.device}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
