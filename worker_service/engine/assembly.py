"""Puts the built-in engine together: a loaded model and its runner, the step loop, its policy, and the models that draft."""

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.services.clock import Clock
from penstock.services.domain.latency import StepLatencyModel
from penstock.services.mesh_schema.common import DEFAULT_STEP_TOKENS
from penstock.types.sampling import SamplingDefaults
from penstock.worker_service.engine.core import CoreLimits, EngineCore
from penstock.worker_service.engine.extension import Progress, untold
from penstock.worker_service.engine.interface import EngineInfo, EngineUnusable
from penstock.worker_service.engine.profile import CALIBRATION_S, MEASURING_S, StepSample, measured_latency, probe
from penstock.worker_service.engine.runner import ModelRunner
from penstock.worker_service.engine.tier_options import chains
from penstock.worker_service.scheduling.batching import BatchLimits
from penstock.worker_service.scheduling.blocks import BlockPool
from penstock.worker_service.scheduling.policies import PolicyName, batch_policy
from penstock.worker_service.text.hf import HfTokenizer

_log = logging.getLogger(__name__)

KV_SHARE_OF_GPU = 0.9  # of its free memory; the rest is for the activations of a step
KV_SHARE_OF_HOST = 0.25  # of the unused memory: other workers load their models, too
LEAST_KV_BYTES = 256 << 20
STEP_S, LONGEST_STEP_S, EFFICIENT_TOKENS, TILE_TOKENS = 2.0, 5.0, 128, 64
"""What a step may take where the tier does not state its tokens: replies wait for the prompts in it, and routers take a
worker for lost after 15 s of silence."""
PROBE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """folder: of a model, or its GGUF file. drafters: smaller models that draft, max_window tokens at most. skips_drafters:
    do without those that have other tokens. max_step_tokens: None: by what a step takes. progress: as in EngineSite. The rest
    is as in the tier of a mesh file."""

    folder: Path
    name: str
    kv_tokens: int | None = None
    kv_block_tokens: int = 16
    max_running: int = 32
    max_queued: int = 64
    max_step_tokens: int | None = DEFAULT_STEP_TOKENS
    max_context_tokens: int | None = None
    threads: int = 1
    tool_format: str = "auto"
    batch_policy: PolicyName = PolicyName.DECODE_FIRST
    best_effort_reserve: float = 0.0
    drafters: tuple[Path, ...] = ()
    skips_drafters: bool = False
    max_window: int = 7
    measuring_s: float = MEASURING_S
    progress: Progress = untold


@dataclass(frozen=True, slots=True)
class Memory:
    """Where KV goes: bytes that are free there with the weights loaded, and whether others use it, too."""

    free_bytes: int
    shared: bool


class LoadedModel(Protocol):
    """A model with its weights in memory, before it has a KV pool.

    kind: the engine's name. digest: equal where KV can be exchanged. context_tokens: the longest sequence. block_bytes: KV of
    a block, about. warm_up_tokens: of a prompt that has everything compiled. own_thread: one thread computes all of a step.
    """

    kind: str
    name: str
    digest: str
    tokenizer: HfTokenizer
    sampling_defaults: SamplingDefaults
    context_tokens: int
    parameters: int
    weights_bytes: int
    block_bytes: int
    warm_up_tokens: int
    own_thread: bool

    def memory(self) -> Memory: ...

    def runner(self, blocks: int) -> ModelRunner:
        """The runner with its KV pool.

        Raises:
            EngineUnusable: There is no memory for it.
        """


def built_in_core(
    options: EngineOptions, load: Callable[[Path], LoadedModel], clock: Clock
) -> tuple[EngineCore, EngineInfo]:
    """Load the models, which takes seconds, and create the core.

    load: loads the tier's model and those that draft; it raises EngineUnusable.
    """
    model, drafters = load(options.folder), list[LoadedModel]()
    began_s = time.perf_counter()
    for folder in options.drafters:
        drafter = load(folder)
        if drafter.tokenizer.has_tokens_of(model.tokenizer):
            drafters.append(drafter)
            continue
        problem = f"speculation.drafters: {drafter.name}: its tokenizer has other tokens than the tier's model"
        if not options.skips_drafters:
            raise EngineUnusable(problem)
        _log.warning("%s: it does not draft", problem)
    measuring_s = options.measuring_s - (time.perf_counter() - began_s)  # of drafters, which also take time to load
    longest = min(model.context_tokens, options.max_context_tokens or model.context_tokens)
    size, each_bytes = options.kv_block_tokens, sum(each.block_bytes for each in (model, *drafters))
    most_tokens = options.max_running * longest
    blocks = kv_blocks(options.kv_tokens, size, each_bytes, model.weights_bytes, most_tokens, model.memory())
    context = min(longest, blocks * size)
    _log.info("%s: %.1f M parameters, %d KV blocks", options.name, model.parameters / 1e6, blocks)
    runner = model.runner(blocks)
    step_tokens = options.max_step_tokens or DEFAULT_STEP_TOKENS
    limits = CoreLimits(BatchLimits(options.max_running, step_tokens), options.max_queued, context)
    core = EngineCore(runner, model.tokenizer, BlockPool(blocks, size), limits, clock)
    if model.own_thread:
        core.timer = time.thread_time  # what others take of the processor does not count
    _compute_prompt(core, model.warm_up_tokens)
    if options.max_step_tokens is None:
        _bound_steps(core)
    _warm_up_copies(core)
    latency, steps = StepLatencyModel.linear(0.0, 0.0, 0.0), list[StepSample]()
    if options.batch_policy is PolicyName.SLO:
        bound = min(CALIBRATION_S, options.measuring_s)
        latency, steps = measured_latency(core, seconds=bound, most_s=options.measuring_s)
    core.scheduler.policy = batch_policy(options.batch_policy, latency, options.best_effort_reserve, steps)
    if drafters:
        core.proposals.drafter = chains()(core, drafters, blocks, options.max_window, measuring_s)
    with contextlib.suppress(AttributeError):  # glibc's: a large vocabulary leaves 100 MB that nothing uses
        ctypes.CDLL(None).malloc_trim(0)
    return core, core.info(model.kind, options.name, model.sampling_defaults)


def kv_blocks(
    kv_tokens: int | None, block_tokens: int, block_bytes: int, weights_bytes: int, most_tokens: int, memory: Memory
) -> int:
    """The number of KV blocks: for `kv_tokens`; None: what fits into the memory, up to `most_tokens`.

    In memory that others use, too, KV gets no more than the weights have, or LEAST_KV_BYTES: it would be most of what a small
    model needs. block_bytes: of the block in the KV caches of all models, the drafting ones included.
    """
    if kv_tokens is not None:
        return max(1, kv_tokens // block_tokens)
    room = memory.free_bytes * (KV_SHARE_OF_HOST if memory.shared else KV_SHARE_OF_GPU)
    if memory.shared:
        room = min(room, max(weights_bytes, LEAST_KV_BYTES))
    return max(1, min(int(room) // block_bytes, -(-most_tokens // block_tokens)))


def host_memory() -> Memory:
    """The host's memory that is free, or that of this process's control group."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    group = Path("/sys/fs/cgroup")
    most, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if most and used and most[0].isdecimal():
        free = min(free, max(0, int(most[0]) - int(used[0])))
    return Memory(free, shared=True)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _compute_prompt(core: EngineCore, tokens: int, token: int = 1) -> float:
    """Compute a prompt of about so many tokens and one decode, as `probe`; the seconds of a token of the prompt.

    So the first request does not wait for compilation.
    """
    length = max(1, min(tokens, core.limits.max_context_tokens - 2, core.limits.batch.max_step_tokens))
    return probe(core, length, 1, token=token)[0]


def _bound_steps(core: EngineCore) -> None:
    """Limit the tokens of a step to those that take STEP_S, by a prompt of the idle core; at least one for each request.

    EFFICIENT_TOKENS may take LONGEST_STEP_S: fewer at once make prompts dearer on a CPU, by 7 % at 80 and 9 % at 32. Whole
    blocks, of enough tokens whole tiles: 113 tokens at once take some 5 % longer for each than 112, a prompt of 768 tokens
    4 % longer by 144 than by 128 (attention of llama.cpp).
    """
    batch, block = core.limits.batch, core.scheduler.pool.block_tokens
    token_s = _compute_prompt(core, PROBE_TOKENS, token=2)
    timely = max(int(STEP_S / token_s), min(EFFICIENT_TOKENS, int(LONGEST_STEP_S / token_s)))
    whole = TILE_TOKENS if timely >= EFFICIENT_TOKENS else block
    most = max(batch.max_running, timely // whole * whole)
    if most < batch.max_step_tokens:
        _log.info("steps of %d tokens, which take about %g s, instead of %d", most, STEP_S, batch.max_step_tokens)
        core.limit_steps(most)


def _warm_up_copies(core: EngineCore) -> None:
    """Copy a block, so that the first move does not wait for compilation."""
    block = core.runner.read_blocks([0])
    core.runner.write_blocks([0], block)
    block.flags.writeable = False  # as KV that arrives: another type for the compiler
    core.runner.write_blocks([0], block)
    core.restart_throughput()
