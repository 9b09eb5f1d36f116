"""Engines of each kind for the suite that all of them pass, and how their replies are read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock.services.domain.latency import StepLatencyModel
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import PositionLogprobs, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import Admitted, EngineFinished
from penstock.worker_service.engine.interface import Capability, Engine, LastBlocks, Stopped
from penstock.worker_service.engine.llamacpp.engine import LlamaCppEngineOptions, llamacpp_engine
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.engine.simulated.engine import SimulatedEngineOptions, simulated_engine
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_engine
from tests.conftest import FAMILY
from tests.support.held_steps import held
from tests.support.present import present
from tests.support.sglang import CPU_LAUNCH, SglangServers

ENGINES = (
    "torch",
    "llamacpp",
    "simulated",
    pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(400)]),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
QUESTIONS = ("What is 12 + 30?", "Reverse 'stone'.", "Sort: 9, 3, 40, 8, 77, 2", "Count from 3 to 31 by 4.")

NARROW = {"max_step_tokens": 7, "kv_block_tokens": 3, "max_running": 2}

Make = Callable[..., Any]
E = TypeVar("E", bound=Engine)


def request(name: str, text: str = QUESTIONS[0], sampling: SamplingParams = GREEDY, **more: Any) -> GenerationRequest:
    return GenerationRequest(name, ChatPrompt((ChatMessage("user", text),)), sampling, **more)


@asynccontextmanager
async def engines_of(request: pytest.FixtureRequest, gguf_family: Callable[[str], Path]) -> AsyncIterator[Make]:
    """What builds and starts engines of one kind; options by the names that all kinds share."""
    async with AsyncExitStack() as stack:

        async def build(**options: Any) -> Engine:
            options = {"kv_tokens": 4096, "max_context_tokens": 2048, **options}
            engine: Engine
            if request.param == "torch":
                engine = torch_engine(TorchEngineOptions(FAMILY / "small", "small", **options))
            elif request.param == "llamacpp":
                request.getfixturevalue("precise_kv")
                engine = llamacpp_engine(LlamaCppEngineOptions(gguf_family("small"), "small", **options))
            elif request.param == "simulated":
                latency = StepLatencyModel.linear(0.0005, 0.0, 0.0)
                engine = simulated_engine(SimulatedEngineOptions("sim", latency, **options))
            else:
                servers: SglangServers = request.getfixturevalue("sglang_servers")
                if options["kv_tokens"] < 256:  # it foresees that there is no room; its own switch for tests does not
                    options["env"] = {**CPU_LAUNCH["env"], "SGLANG_TEST_RETRACT": "1"}
                engine = await servers.engine(FAMILY / "small", **options)
            return await stack.enter_async_context(started(engine))

        yield build


@asynccontextmanager
async def started(engine: E) -> AsyncIterator[E]:
    """An engine while it runs."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def needs(engine: Engine, *capabilities: Capability) -> None:
    """Skip the test where the engine says that it cannot."""
    if missing := [c.value for c in capabilities if c not in engine.info.capabilities]:
        pytest.skip(f"this engine does not declare {', '.join(missing)}")


def repeatable(engine: Engine) -> tuple[SamplingParams, ...]:
    """The samplings under which a reply is the same every time."""
    return (GREEDY, SAMPLED) if Capability.SEEDED_SAMPLING in engine.info.capabilities else (GREEDY,)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@dataclass
class Got:
    """A whole reply."""

    admitted: Admitted | None = None
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    finished: EngineFinished | None = None


async def collect(events: AsyncIterator[Any], first: int = 0) -> Got:
    """Read a reply, checking that its events come in order and its frames without gap or overlap."""
    got, at = Got(), first
    async for event in events:
        assert got.finished is None, "an event after the last"
        match event:
            case Admitted():
                assert got.admitted is None
                assert at == first
                got.admitted = event
            case TokenFrame():
                assert got.admitted is not None
                assert event.offset == at
                at = event.end
                got.tokens += event.token_ids
                got.text += event.text
                got.logprobs += tuple(event.logprobs)
            case EngineFinished():
                got.finished = event
    assert present(got.finished).usage.output_tokens == at
    return got


async def answer(engine: Engine, asked: GenerationRequest) -> Got:
    return await collect(engine.generate(asked), len(asked.resume_token_ids))


def waits_at(engine: LoopEngine, output_tokens: int) -> Callable[[], None]:
    """Have no reply grow beyond so many tokens until the result is called: it does not end before what is tried with it."""
    return held(engine, lambda scheduler: any(s.output_tokens >= output_tokens for s in scheduler.running))


async def move(
    source: LoopEngine, target: LoopEngine, request_id: str, transfer_id: str
) -> tuple[Stopped, int, LastBlocks]:
    """Copy what a request has computed while it decodes, then stop it: ready to enter with its last blocks."""
    tokens = await source.computed_tokens(request_id)
    present = await target.reserve(transfer_id, source.kv_layout, tokens)
    whole = len(tokens) // source.kv_layout.block_tokens
    for block in range(present, whole):
        await target.write_kv(transfer_id, block, await source.read_kv(request_id, block, 1))
    stopped = await source.pause(request_id, whole)
    return stopped, present, LastBlocks(whole, stopped.data)


async def nothing_held(engine: LoopEngine) -> None:
    """Return once nobody holds a block."""
    async with asyncio.timeout(60):
        await until(lambda: engine.load().free_kv_blocks == engine.info.kv_blocks)
