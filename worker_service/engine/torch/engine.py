"""Loads a model folder and creates the built-in engine for it."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from services.clock import Clock, SystemClock
from services.domain.latency import StepLatencyModel
from services.mesh_schema import DEFAULT_KV_TOKENS
from worker_service.engine.batch_policy import batch_policy
from worker_service.engine.core import CoreLimits, EngineCore
from worker_service.engine.digest import model_digest
from worker_service.engine.generation_config import sampling_defaults
from worker_service.engine.interface import EngineInfo, EngineUnusable, KvLayout, capabilities_of_own_steps
from worker_service.engine.latency_fit import measured_latency
from worker_service.engine.loop import LoopEngine, OutputCoalescing
from worker_service.engine.torch import plain_model
from worker_service.engine.torch.attention import KERNEL_TOKENS
from worker_service.engine.torch.draft_loading import (
    LoadedDraftModel,
    OtherTokens,
    adaptive_drafter,
    load_draft_model,
)
from worker_service.engine.torch.plain_model import CausalModel
from worker_service.engine.torch.runner import TorchRunner, kv_layout
from worker_service.scheduling import BatchLimits, BlockPool, PolicyName
from worker_service.text.hf import HfTokenizer

_log = logging.getLogger(__name__)

KV_SHARE_OF_FREE_MEMORY = 0.9  # the rest is for the activations of a step


@dataclass(frozen=True, slots=True)
class TorchEngineOptions:
    """folder: a model in Hugging Face format. kernel, fused, compiled: as in TorchRunner. drafters: folders of smaller models
    that draft, max_window tokens at most. skips_drafters: do without those that have other tokens. The rest is as in the tier
    of a mesh file."""

    folder: Path
    name: str
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_tokens: int | None = None
    kv_block_tokens: int = 16
    max_running: int = 32
    max_queued: int = 64
    max_step_tokens: int = 512
    max_context_tokens: int | None = None
    threads: int = 1
    kernel: bool | None = None
    fused: bool | None = None
    compiled: bool | None = None
    tool_format: str = "auto"
    batch_policy: PolicyName = PolicyName.DECODE_FIRST
    best_effort_reserve: float = 0.0
    drafters: tuple[Path, ...] = ()
    skips_drafters: bool = False
    max_window: int = 7


def torch_engine(
    options: TorchEngineOptions, clock: Clock | None = None, hold: OutputCoalescing | None = None
) -> LoopEngine:
    """The built-in engine. Its start() raises EngineUnusable for a folder that it cannot serve."""
    return LoopEngine(lambda: torch_core(options, clock or SystemClock()), hold)


def torch_core(options: TorchEngineOptions, clock: Clock) -> tuple[EngineCore, EngineInfo]:
    """Load the model, which takes seconds, and create the core."""
    torch.set_num_threads(options.threads)
    model = load_model(options.folder, options)
    config, defaults = model.config, sampling_defaults(options.folder)
    tokenizer = HfTokenizer(options.folder, config.vocab_size, options.tool_format)
    layout = kv_layout(model, options.kv_block_tokens, model_digest(options.folder))
    drafters = list[LoadedDraftModel]()
    for folder in options.drafters:
        try:
            drafters.append(
                load_draft_model(folder, lambda folder: load_model(folder, options), tokenizer, options.kv_block_tokens)
            )
        except OtherTokens as error:
            if not options.skips_drafters:
                raise
            _log.warning("%s: it does not draft", error)
    drafter_bytes = sum(drafter.layout.block_bytes for drafter in drafters)
    blocks = kv_blocks(options.kv_tokens, layout, _free_bytes(model.device), drafter_bytes)
    context = min(
        config.max_position_embeddings,
        options.max_context_tokens or config.max_position_embeddings,
        blocks * options.kv_block_tokens,
    )
    _log.info("%s: %.1f M parameters, %d KV blocks", options.name, model.num_parameters() / 1e6, blocks)
    try:
        runner = TorchRunner(
            model,
            blocks,
            layout,
            threads=options.threads,
            kernel=options.kernel,
            fused=options.fused,
            compiled=options.compiled,
        )
    except RuntimeError as error:  # not enough memory
        room = blocks * options.kv_block_tokens
        raise EngineUnusable(f"kv_tokens: not enough memory for {room}: {_first_line(error)}") from error
    limits = CoreLimits(BatchLimits(options.max_running, options.max_step_tokens), options.max_queued, context)
    core = EngineCore(runner, tokenizer, BlockPool(blocks, options.kv_block_tokens), limits, clock)
    if options.threads == 1 and model.device.type == "cpu":
        core.timer = (
            time.thread_time
        )  # this thread computes all of a step: what others take of the processor does not count
    _warm_up(core)
    if options.batch_policy is not PolicyName.DECODE_FIRST:
        measured = options.batch_policy is PolicyName.SLO
        latency = measured_latency(core) if measured else StepLatencyModel.linear(0.0, 0.0, 0.0)
        core.scheduler.policy = batch_policy(options.batch_policy, latency, options.best_effort_reserve)
    if drafters:
        core.proposals.drafter = adaptive_drafter(
            core, drafters, blocks, options.max_window, threads=options.threads, compiled=options.compiled
        )
    info = EngineInfo(
        engine="torch",
        model=options.name,
        model_digest=layout.model_digest,
        max_context_tokens=context,
        kv_blocks=blocks,
        kv_block_tokens=options.kv_block_tokens,
        max_requests=options.max_running + options.max_queued,
        capabilities=capabilities_of_own_steps(keeps_slos=core.scheduler.policy.keeps_slos),
        sampling_defaults=defaults,
    )
    return core, info


def kv_blocks(kv_tokens: int | None, layout: KvLayout, free_bytes: int | None, drafter_block_bytes: int = 0) -> int:
    """The number of KV blocks: for `kv_tokens`; None: what fits into the free memory of a GPU, else DEFAULT_KV_TOKENS.

    free_bytes: of the GPU with all weights in it; None on a CPU. drafter_block_bytes: of the same block in the KV caches of
    the models that draft, which have as many blocks.
    """
    if kv_tokens is None and free_bytes is not None:
        return max(1, int(free_bytes * KV_SHARE_OF_FREE_MEMORY) // (layout.block_bytes + drafter_block_bytes))
    return max(1, (kv_tokens or DEFAULT_KV_TOKENS) // layout.block_tokens)


def _free_bytes(device: torch.device) -> int | None:
    free: int | None = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    return free


def load_model(folder: Path, options: TorchEngineOptions) -> CausalModel:
    """Load a model to the engine's device.

    Raises:
        EngineUnusable: It cannot be loaded, or the device cannot hold it.
    """
    if not (folder / "config.json").exists():
        raise EngineUnusable(f"{folder}: no config.json, so not a model in Hugging Face format")
    config = plain_model.read_config(folder)
    if config is None:
        _check_with_transformers(folder)
    model: CausalModel
    try:
        if config is not None and options.fused is not False:
            model = plain_model.read_model(folder, config, options.dtype)
        else:
            from transformers import AutoModelForCausalLM  # seconds of imports

            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=options.dtype, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineUnusable(f"{folder}: {error}") from error
    try:
        return model.eval().to(options.device)
    except (RuntimeError, AssertionError) as error:  # no such device, no CUDA, or not enough memory for the weights
        raise EngineUnusable(f"device {options.device}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _check_with_transformers(folder: Path) -> None:
    """Raises:
    EngineUnusable: The folder holds no model that this engine can serve.
    """
    from transformers import AutoConfig  # seconds of imports

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    if config.model_type not in plain_model.ARCHITECTURES:
        known = ", ".join(plain_model.ARCHITECTURES)
        raise EngineUnusable(f"{folder}: model type '{config.model_type}' is not one of {known}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise EngineUnusable(f"{folder}: sliding-window attention is not supported")


def _warm_up(core: EngineCore) -> None:
    """Run one prompt, long enough for torch's attention where that is used, and one decode, and copy a block, so that neither
    the first request nor the first move waits for compilation."""
    from services.domain.requests import GenerationRequest, SamplingParams, TokenPrompt

    sampling = SamplingParams(temperature=0.0, max_output_tokens=2, ignore_eos=True)
    length = min(2 * KERNEL_TOKENS, core.limits.max_context_tokens - 2)
    core.add(GenerationRequest("warm-up", TokenPrompt((1,)), sampling), [1] * max(1, length))
    while not core.idle:
        core.step()
    block = core.runner.read_blocks([0])
    core.runner.write_blocks([0], block)
    block.flags.writeable = False  # as KV that arrives: another type for the compiler
    core.runner.write_blocks([0], block)
    core.restart_throughput()
