"""SLOs at a real SGLang server: what is admitted by prediction, and what was attained, by the client's clock."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from penstock.services.domain.slo.attainment import AttainmentTracker
from penstock.types.prompts import TextPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloPhase
from penstock.types.workers import Admitted
from penstock.worker_service.engine.interface import Capability
from penstock.worker_service.engine.sglang.engine import SglangEngine, SglangEngineOptions
from tests.conftest import FAMILY
from tests.support.engines import started
from tests.support.sglang import SglangServers, cpu_shape

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

REQUESTS, TOKENS = 8, 24  # as many as the server has places for
GENEROUS = Slo(300.0, (SloPhase(0, 30.0),))
IMPOSSIBLE = Slo(1e-4, (SloPhase(0, 1e-7),))


@pytest.fixture
async def engine(sglang_servers: SglangServers) -> AsyncIterator[SglangEngine]:
    url = await sglang_servers.url(cpu_shape(FAMILY / "small", max_running=REQUESTS))
    async with started(SglangEngine(SglangEngineOptions(FAMILY / "small", "small", url, keeps_slos=True))) as made:
        yield made


async def served(engine: SglangEngine, name: str, slo: Slo | None) -> tuple[bool, bool]:
    """(promised, attained)."""
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompt = TextPrompt(f"Question {name}: what is the capital of France, and what is it known for?")
    tracker = AttainmentTracker(None if slo is None else slo.time_to_first_token_s)
    began_s, times_s, promised = time.perf_counter(), list[float](), False
    async for event in engine.generate(GenerationRequest(name, prompt, sampling, slo=slo)):
        if isinstance(event, Admitted):
            promised = event.slo_kept
        elif isinstance(event, TokenFrame):
            for _ in event.token_ids:
                times_s.append(time.perf_counter() - began_s)
                tracker.token(times_s[-1], None if slo is None else slo.phases[0].time_per_output_token_s)
    assert len(times_s) == TOKENS
    return promised, tracker.result().attained


async def test_a_real_server_keeps_what_is_promised_and_serves_the_rest(engine: SglangEngine) -> None:
    """A burst with generous objectives is promised and attained; impossible ones are served as best effort, whole."""
    assert Capability.SLO_PREDICTED in engine.info.capabilities
    generous = await asyncio.gather(*(served(engine, f"g{i}", GENEROUS) for i in range(REQUESTS)))
    assert generous == [(True, True)] * REQUESTS
    impossible = await asyncio.gather(*(served(engine, f"i{i}", IMPOSSIBLE) for i in range(3)))
    assert not any(promised or attained for promised, attained in impossible)
