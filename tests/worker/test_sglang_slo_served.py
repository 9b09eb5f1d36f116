"""SLOs at a real SGLang server: what is admitted by prediction, and what was attained, by the client's clock."""

import asyncio
import statistics
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
SCALES = ((5.0, 10.0), (20.0, 40.0))  # times the idle first token and pace: objectives of the bursts that are reported


@pytest.fixture
async def engine(sglang_servers: SglangServers) -> AsyncIterator[SglangEngine]:
    url = await sglang_servers.url(cpu_shape(FAMILY / "small", max_running=REQUESTS))
    async with started(SglangEngine(SglangEngineOptions(FAMILY / "small", "small", url, keeps_slos=True))) as made:
        yield made


async def served(engine: SglangEngine, name: str, slo: Slo | None) -> tuple[bool, bool, list[float]]:
    """(promised, attained, when each token came)."""
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
    return promised, slo is not None and tracker.result().attained, times_s


async def test_a_real_server_keeps_what_is_promised_and_serves_the_rest(engine: SglangEngine) -> None:
    """A burst with generous objectives is promised and attained; impossible ones are served as best effort, whole.

    Then bursts with multiples of the idle first token and pace: what came of them is printed, not asserted.
    """
    assert Capability.SLO_PREDICTED in engine.info.capabilities
    generous = await asyncio.gather(*(served(engine, f"g{i}", GENEROUS) for i in range(REQUESTS)))
    assert [(promised, attained) for promised, attained, _ in generous] == [(True, True)] * REQUESTS
    impossible = await asyncio.gather(*(served(engine, f"i{i}", IMPOSSIBLE) for i in range(3)))
    assert not any(promised or attained for promised, attained, _ in impossible)

    alone = [(await served(engine, f"a{i}", None))[2] for i in range(4)]
    idle_s = statistics.median(times_s[0] for times_s in alone)
    step_s = statistics.median((times_s[-1] - times_s[0]) / (TOKENS - 1) for times_s in alone)
    print(f"idle: first token {1000 * idle_s:.1f} ms, a token every {1000 * step_s:.1f} ms")
    for first, pace in SCALES:
        slo = Slo(first * idle_s, (SloPhase(0, pace * step_s),))
        burst = await asyncio.gather(*(served(engine, f"b{first}-{i}", slo) for i in range(REQUESTS)))
        kept = [attained for promised, attained, _ in burst if promised]
        print(
            f"{first:g} times the first token, {pace:g} times the pace: of {REQUESTS} at once {len(kept)} promised, "
            f"{sum(kept)} of these attained, {sum(attained for _, attained, _ in burst)} in all; "
            f"correction {engine.latency_correction:.2f}"
        )
