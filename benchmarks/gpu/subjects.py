"""The engines that are measured: the torch engine in this process, and an SGLang server."""

import asyncio
import gc
import importlib.util
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

import numpy as np

from benchmarks.gpu.shapes import Shape, write_config, write_model
from benchmarks.simulator import EngineTime, Sample, drive
from penstock.planner_service.simulator import EngineLimits, Replica, Served, Workload
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.prompts import TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.profile import timed_steps
from penstock.worker_service.engine.sglang.client import ServerInfo, SglangClient, server_id
from penstock.worker_service.engine.sglang.launch import ServerShape
from penstock.worker_service.engine.sglang.profile import measure_decodes, measure_server
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core
from tests.support import sglang

MIXED_STEPS = 16  # decode steps that are timed per batch
MEM_FRACTION = 0.85  # of the GPU's memory, for an SGLang server
SGLANG_PYTHON = "PENSTOCK_SGLANG_PYTHON"  # environment variable: an interpreter with sglang

Numbers = Literal["float32", "bfloat16"]


class Subject(Protocol):
    """An engine with a model. name: for tables."""

    name: str

    def replica(self, latency: StepLatencyModel) -> Replica:
        """A replica of the planner with these step times and the engine's own limits."""

    def samples(self, seed: int, enough: Callable[[], bool]) -> list[Sample]:
        """Loads and seconds of steps over batch sizes and lengths, in an order drawn by `seed`, until it is enough."""

    def decode_step_s(self, lengths: Sequence[int], seed: int) -> float | None:
        """Seconds of a decode step with sequences of these lengths; None if the engine could not run them together."""

    def serve(self, work: Workload, seed: int) -> Served:
        """Serve a workload with random prompts."""


class TorchSubject:
    """The torch engine, called step by step."""

    def __init__(self, core: EngineCore, clock: EngineTime) -> None:
        self.name = "torch"
        self.core, self._clock = core, clock

    def close(self) -> None:
        """Release the engine, also where this object is still referenced: its KV fills a GPU, which the next one needs."""
        del self.core
        _release()

    def replica(self, latency: StepLatencyModel) -> Replica:
        limits, pool = self.core.limits.batch, self.core.scheduler.pool
        engine = EngineLimits(limits.max_running, limits.max_step_tokens, pool.block_tokens)
        return Replica(ReplicaShape(1, 1), latency, pool.count * pool.block_tokens, engine)

    def samples(self, seed: int, enough: Callable[[], bool]) -> list[Sample]:
        steps = timed_steps(self.core, seed=seed)
        try:
            return list(itertools.takewhile(lambda _: not enough(), steps))
        finally:
            steps.close()  # type: ignore[attr-defined]  # it is a generator; the core is idle then

    def decode_step_s(self, lengths: Sequence[int], seed: int) -> float | None:
        core, draw = self.core, random.Random(seed)
        limits = core.limits.batch
        # the first ones decode while the prompts of the last are computed
        room = max(1, limits.max_step_tokens - len(lengths))
        most = 2 * (sum(lengths) // room + len(lengths)) + MIXED_STEPS
        names = [f"mixed-{i}" for i in range(len(lengths))]
        sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        for name, length in zip(names, lengths, strict=True):
            prompt = _prompt(draw, core.tokenizer.vocab_size, length)
            core.add(GenerationRequest(name, TokenPrompt(tuple(prompt)), sampling), prompt)
        decoding, times = set[str](), list[float]()
        try:
            while len(times) < MIXED_STEPS and not core.idle:
                complete = len(decoding) == len(names)
                began = time.perf_counter()
                events = core.step()
                taken_s = time.perf_counter() - began
                stepped = {name for name, event in events if isinstance(event, TokenFrame)}
                if complete and len(stepped) == len(names):
                    times.append(taken_s)
                decoding |= stepped
        finally:
            for name in names:
                core.abort(name)
        return median(times) if times else None

    def prefill_s(self, tokens: int, seed: int) -> float:
        """Seconds from a prompt of so many tokens to its first token."""
        prompt = _prompt(random.Random(seed), self.core.tokenizer.vocab_size, tokens)
        began = time.perf_counter()
        for _ in self.reply(prompt, 1):
            pass
        return time.perf_counter() - began

    def reply(self, prompt: list[int], tokens: int, *, ignore_eos: bool = True) -> Iterator[TokenFrame]:
        """The greedy reply to a prompt alone, with the two most likely tokens of each position."""
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, top_logprobs=2, ignore_eos=ignore_eos)
        self.core.add(GenerationRequest("alone", TokenPrompt(tuple(prompt)), sampling), prompt)
        while not self.core.idle:
            yield from (event for _, event in self.core.step() if isinstance(event, TokenFrame))

    def serve(self, work: Workload, seed: int) -> Served:
        first, finish, seconds = drive(self.core, self._clock, work, seed)
        return Served(first, finish, np.zeros(len(work), np.int64), 0.0, len(seconds), 0)


@contextmanager
def torch_subject(shape: Shape, device: str, folder: Path, seed: int) -> Iterator[Subject]:
    """The torch engine with the shape's model, or a random one."""
    dtype: Numbers = "bfloat16" if device.startswith("cuda") else "float32"
    model = shape.folder or write_model(folder / f"{shape.name}-torch", shape, dtype, device, seed)
    with closing(started(shape, model, device, dtype)) as subject:
        yield subject


def started(shape: Shape, model: Path, device: str, dtype: Numbers) -> TorchSubject:
    """The torch engine with a model. The caller closes it."""
    _release()
    clock = EngineTime(time.perf_counter)
    options = TorchEngineOptions(
        model,
        shape.name,
        device=device,
        dtype=dtype,
        kv_tokens=shape.kv_tokens,
        max_running=shape.max_running,
        max_queued=1_000_000,  # a replay beyond the engine's capacity must not be refused
        max_step_tokens=shape.max_step_tokens,
    )
    return TorchSubject(torch_core(options, clock)[0], clock)


def _release() -> None:
    """Give memory back that no tensor uses, on a GPU to the device."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


class SglangSubject:
    """An SGLang server, called over HTTP."""

    def __init__(self, loop: asyncio.Runner, client: SglangClient, server: ServerInfo, vocabulary: int) -> None:
        self.name = "sglang"
        self._loop, self._client, self._server, self._vocabulary = loop, client, server, vocabulary

    def replica(self, latency: StepLatencyModel) -> Replica:
        server = self._server
        limits = EngineLimits(server.max_running, server.step_tokens, server.page_tokens)
        return Replica(ReplicaShape(server.tp, server.pp), latency, server.kv_tokens, limits)

    def samples(self, seed: int, enough: Callable[[], bool]) -> list[Sample]:
        return self._loop.run(measure_server(self._client, self._server, self._vocabulary, seed=seed, enough=enough))

    def decode_step_s(self, lengths: Sequence[int], seed: int) -> float | None:
        draw = random.Random(seed)

        async def measure() -> float | None:
            await self._client.forget_prefixes()
            samples = await measure_decodes(self._client, [_prompt(draw, self._vocabulary, n) for n in lengths])
            return samples[0][1] if samples else None

        return self._loop.run(measure())

    def serve(self, work: Workload, seed: int) -> Served:
        return self._loop.run(self._serve(work, seed))

    async def _serve(self, work: Workload, seed: int) -> Served:
        draw, loop = random.Random(seed), asyncio.get_running_loop()
        prompts = [_prompt(draw, self._vocabulary, n) for n in work.input_tokens.tolist()]
        first, finish = np.zeros(len(work)), np.zeros(len(work))
        await self._client.forget_prefixes()
        began_s = loop.time()

        async def one(i: int) -> None:
            await asyncio.sleep(max(0.0, began_s + float(work.arrival_s[i]) - loop.time()))
            sampling = {"temperature": 0.0, "max_new_tokens": int(work.output_tokens[i]), "ignore_eos": True}
            async with aclosing(self._client.generate(server_id(f"replay-{i}"), prompts[i], sampling)) as pieces:
                async for piece in pieces:
                    if piece.token_ids:
                        finish[i] = loop.time() - began_s
                        first[i] = first[i] or finish[i]

        await asyncio.gather(*map(one, range(len(work))))
        return Served(first, finish, np.zeros(len(work), np.int64), 0.0, 0, 0)


def sglang_python(device: str) -> str | None:
    """An interpreter with sglang for this device; None if there is none."""
    if python := os.environ.get(SGLANG_PYTHON):
        return python
    if device == "cpu":
        return sglang.CPU_LAUNCH["python"] if sglang.installed() else None
    return sys.executable if importlib.util.find_spec("sglang") is not None else None


@contextmanager
def sglang_subject(shape: Shape, device: str, folder: Path, python: str) -> Iterator[Subject]:
    """An SGLang server that makes up its weights."""
    cpu = device == "cpu"
    model = write_config(folder / f"{shape.name}-sglang", shape, "float32" if cpu else "bfloat16")
    if cpu:
        server = sglang.cpu_shape(model, kv_tokens=shape.kv_tokens)
    else:
        server = ServerShape(
            python, str(model), shape.name, device=device, kv_tokens=None, mem_fraction=MEM_FRACTION, dtype="bfloat16"
        )
    server = replace(
        server,
        max_running=shape.max_running,
        max_queued=4096,
        max_step_tokens=shape.max_step_tokens,
        flags=(*server.flags, "--load-format", "dummy"),
    )
    with sglang.launched_server(server, folder / f"{shape.name}-sglang.log") as url, asyncio.Runner() as loop:

        async def connected() -> tuple[SglangClient, ServerInfo]:
            client = SglangClient(url)
            return client, await client.info()

        client, info = loop.run(connected())
        try:
            yield SglangSubject(loop, client, info, shape.vocabulary)
        finally:
            loop.run(client.close())


def _prompt(draw: random.Random, vocabulary: int, count: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]
