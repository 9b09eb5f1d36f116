"""What only the engines around our own core have: a thread that can fail, and seeds that change what is drawn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.domain import StepLatencyModel, Unavailable
from tests.conftest import FAMILY
from tests.worker.test_engine_contract import SAMPLED, answer, request
from worker_service.engine.loop import LoopEngine
from worker_service.engine.simulated import SimulatedEngineOptions, simulated_engine
from worker_service.engine.torch import TorchEngineOptions, torch_engine


def of_torch() -> LoopEngine:
    return torch_engine(TorchEngineOptions(FAMILY / "small", "small", kv_tokens=4096))


def of_nothing() -> LoopEngine:
    return simulated_engine(SimulatedEngineOptions("sim", StepLatencyModel.linear(0.0005, 0.0, 0.0)))


@pytest.mark.parametrize("build", [of_torch, of_nothing])
async def test_a_broken_runner_fails_every_stream_and_says_so(build: Callable[[], LoopEngine]) -> None:
    engine = build()
    await engine.start()

    def broken(_: object) -> list[Any]:
        raise RuntimeError("no more memory")

    engine._core.runner.run = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(Unavailable):
        await answer(engine, request("a"))
    error = await engine.failed()
    assert "no more memory" in str(error)
    await engine.close()


async def test_another_seed_gives_another_reply() -> None:
    engine = of_torch()
    await engine.start()
    hot = replace(SAMPLED, temperature=2.0, top_p=1.0)
    replies = {(await answer(engine, request(f"r{s}", sampling=replace(hot, seed=s)))).tokens for s in range(4)}
    assert len(replies) > 1
    await engine.close()
