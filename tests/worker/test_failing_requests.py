"""Nothing that one request does ends an engine: its error ends that request. Only a broken runner fails all of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.services.clock import SystemClock
from penstock.services.domain.errors import InvalidRequest, RequestFailed, Unavailable
from penstock.services.domain.latency import StepLatencyModel
from penstock.types.prompts import TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import HandedOver
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.interface import LastBlocks
from penstock.worker_service.engine.logits import HostLogits
from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.engine.sampling import Position, choose
from penstock.worker_service.engine.simulated.engine import SimulatedEngineOptions, simulated_engine
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core, torch_engine
from tests.conftest import FAMILY
from tests.support.engines import GREEDY, SAMPLED, answer, collect, request, started
from tests.support.held_steps import step_gate
from tests.worker.test_core_laws import before_each_pass

GUILTY = 5  # a token id that the prompts of innocent requests do not have


def of_torch() -> LoopEngine:
    return torch_engine(TorchEngineOptions(FAMILY / "small", "small", kv_tokens=4096))


def of_nothing() -> LoopEngine:
    return simulated_engine(SimulatedEngineOptions("sim", StepLatencyModel.linear(0.0005, 0.0, 0.0)))


@pytest.fixture(params=[of_torch, of_nothing])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[LoopEngine]:
    async with started(request.param()) as made:
        yield made


def fail_on(engine: LoopEngine, guilty: Callable[[Any], bool]) -> None:
    """Have the engine's own runner raise for every step with such a row in it."""

    def failing(rows: Any) -> None:
        if any(guilty(row) for row in rows):
            raise RuntimeError("this step cannot be computed")

    before_each_pass(engine._core, failing)


def has_guilty_token(row: Any) -> bool:
    return GUILTY in row.tokens


def guilty(name: str) -> GenerationRequest:
    return GenerationRequest(name, TokenPrompt((65, 66, GUILTY, 67)), GREEDY)


async def innocent(engine: LoopEngine) -> list[Any]:
    return [(await answer(engine, request(f"before-{i}", f"{i} + 4 = ?"))).tokens for i in range(4)]


def assert_nothing_is_held(engine: LoopEngine) -> None:
    core = engine._core
    assert core.idle
    assert core.scheduler.pool.free == core.scheduler.pool.count
    assert not core._requests
    assert not engine._streams
    assert not engine._thread.held


async def test_a_row_that_fails_ends_its_request_alone(engine: LoopEngine) -> None:
    """The others of its batch go on with the tokens that they get without it, and what it held is free again."""
    expected = await innocent(engine)
    fail_on(engine, has_guilty_token)
    replies = await asyncio.gather(
        *(answer(engine, request(f"r{i}", f"{i} + 4 = ?")) for i in range(4)),
        *(answer(engine, guilty(f"bad{i}")) for i in range(3)),
        return_exceptions=True,
    )
    assert [reply.tokens for reply in replies[:4] if not isinstance(reply, BaseException)] == expected
    assert all(isinstance(reply, RequestFailed) for reply in replies[4:])
    assert_nothing_is_held(engine)


async def test_a_request_that_fails_alone_does_not_end_the_engine(engine: LoopEngine) -> None:
    """With nobody beside it, one token of the engine's own tells a bad request from a broken engine."""
    fail_on(engine, has_guilty_token)
    with pytest.raises(RequestFailed, match="RuntimeError"):
        await answer(engine, guilty("alone"))
    assert (await answer(engine, request("after"))).finished is not None
    assert_nothing_is_held(engine)


async def test_text_that_fails_ends_its_request_alone(engine: LoopEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it fails in the middle of a reply, by what is no Exception, with tokens held back for company."""

    class Panic(BaseException):
        """As pyo3's."""

    expected = await innocent(engine)
    stream, steps = engine.tokenizer.stream, 0

    class Failing:
        def __call__(self, token_id: int) -> str:
            nonlocal steps
            steps += 1
            if steps > 3:
                raise Panic
            return ""

    monkeypatch.setattr(engine.tokenizer, "stream", Failing)
    bad = asyncio.create_task(answer(engine, request("bad")))
    await asyncio.sleep(0)
    while "bad" not in engine._streams and not bad.done():
        await asyncio.sleep(0)
    monkeypatch.setattr(engine.tokenizer, "stream", stream)
    replies = await asyncio.gather(*(answer(engine, request(f"r{i}", f"{i} + 4 = ?")) for i in range(4)))
    assert [reply.tokens for reply in replies] == expected
    with pytest.raises(RequestFailed, match="Panic"):
        await bad
    assert_nothing_is_held(engine)


async def test_a_command_that_fails_is_its_callers_error(engine: LoopEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine._core.transfers, "reserve", broken)
    with pytest.raises(RequestFailed, match="ZeroDivisionError"):
        await engine.reserve("t", engine.kv_layout, [1, 2, 3])
    assert (await answer(engine, request("after"))).finished is not None


async def test_kv_without_numbers_fails_the_request_that_brought_it() -> None:
    """NaN that arrives with a moving request reaches its own logits and nobody else's."""
    async with started(of_torch()) as engine:
        expected = await innocent(engine)
        layout, tokens = engine.kv_layout, [*range(65, 65 + 20)]
        await engine.reserve("t", layout, tokens)
        shape = (2, layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        asked = GenerationRequest("bad", TokenPrompt(tuple(tokens)), GREEDY)
        broken = LastBlocks(0, np.full(shape, np.nan, np.float32))
        replies = await asyncio.gather(
            *(answer(engine, request(f"r{i}", f"{i} + 4 = ?")) for i in range(4)),
            collect(engine.enter("t", asked, [*tokens, 65], broken)),
            return_exceptions=True,
        )
        assert [reply.tokens for reply in replies[:4] if not isinstance(reply, BaseException)] == expected
        assert isinstance(replies[4], RequestFailed)
        assert_nothing_is_held(engine)


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-45, 1e-38, 1e-4])
@pytest.mark.parametrize("top_p", [1.0, 1e-300, 0.999999999999])
async def test_a_temperature_however_small_is_sampled_at_its_limit(temperature: float, top_p: float) -> None:
    core, _ = torch_core(TorchEngineOptions(FAMILY / "small", "small", kv_tokens=2048), SystemClock())
    cold = replace(SAMPLED, temperature=temperature, top_p=top_p, top_logprobs=3)
    assert tokens_of(core, cold) == tokens_of(core, replace(GREEDY, top_logprobs=3))


def tokens_of(core: EngineCore, sampling: SamplingParams) -> list[int]:
    prompt = core.tokenizer.encode(request("r").prompt)
    core.add(request("r", sampling=sampling), prompt)
    events = []
    while not core.idle:
        events += core.step()
    return [token for _, event in events if isinstance(event, TokenFrame) for token in event.token_ids]


def test_sampling_is_sound_at_the_ends_of_its_range() -> None:
    """No extreme of logits, temperature or top-p gives what is no token or no distribution; equal logits share evenly."""
    wide = np.array([[3e38, -3e38, 0, -np.inf], [0, 0, -1, -2], [1e-30, 0, -1e-30, 0]], np.float32)
    for temperature in (5e-324, 1e-20, 1e-4, 1.0, 2.0):
        for top_p in (5e-324, 1e-12, 0.5, 1.0):
            rows = [Position(SamplingParams(temperature, top_p, seed), 3) for seed in (0, 2**63 - 1, 17)]
            chosen = choose(HostLogits(wide), rows)
            assert all(np.isfinite(wide[row, token]) for row, token in enumerate(chosen))
    # the least temperature that is not greedy
    tied = [choose(HostLogits(wide[1:2]), [Position(SamplingParams(1e-4, 1.0, seed), 0)])[0] for seed in range(64)]
    assert set(tied) == {0, 1}
    choose(HostLogits(np.full((2, 4), np.nan, np.float32)), [Position(SAMPLED, 0)] * 2)  # its row fails, not the step


async def test_tokens_that_only_the_tokenizer_knows_are_refused() -> None:
    """They would be beyond the model's embedding."""
    async with started(of_torch()) as engine:
        engine.tokenizer.vocab_size = 60
        with pytest.raises(InvalidRequest, match="prompt"):
            await answer(engine, request("r"))


async def test_a_broken_runner_fails_every_stream_and_says_so(engine: LoopEngine) -> None:
    def broken(_: object) -> list[Any]:
        raise RuntimeError("no more memory")

    engine._core.runner.run = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(Unavailable):
        await answer(engine, request("a"))
    assert "no more memory" in str(await engine.failed())


async def test_the_reader_of_a_reply_that_has_left_does_not_wait_for_the_step_under_way() -> None:
    endless = replace(GREEDY, max_tokens=4000, ignore_eos=True)
    async with started(of_nothing()) as engine:
        other = asyncio.create_task(answer(engine, request("stays", sampling=endless)))
        with step_gate(engine) as gate:
            async with aclosing(engine.generate(request("leaves", sampling=endless))) as events:
                async for event in events:
                    if isinstance(event, TokenFrame) and event.offset >= 5:
                        break
                stopped = await engine.pause("leaves", 0)
                gate.close()
                await asyncio.to_thread(gate.inside.wait)
                async with asyncio.timeout(60):
                    assert await engine.leave("leaves") == HandedOver(stopped.output_tokens)
                    rest = [event async for event in events]
                assert rest[-1] == HandedOver(stopped.output_tokens)
                gate.open()
        other.cancel()
        await asyncio.wait([other])
