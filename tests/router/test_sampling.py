"""What a router reports about its requests: every one equally likely, whole windows, no text."""

import asyncio
import random
from collections import Counter

import yaml

from router_service.domain.events import Finished, RouterRequest, TierSummary
from router_service.telemetry.sampling import WindowSampler
from services.clock import VirtualClock
from services.domain.requests import FinishReason, TextPrompt, TokenUsage
from services.domain.workload import TierVisit
from services.state import WorkloadStore
from services.testing import RedisProcess
from tests.conftest import ROOT, MeshFileMaker
from tests.support.mesh import running_mesh

REQUEST = RouterRequest("r", "cascade", TextPrompt("secret"), None, 0.0)  # type: ignore[arg-type]


def finished(tokens: int) -> Finished:
    tier = TierSummary("small", "m", "i", 80.0, 50.0, True, TokenUsage(tokens, 0, 7), 0.1)
    return Finished(FinishReason.STOP, "small", tier.usage, (tier,), 0.1, 0.2, "t")


def test_every_request_of_a_window_is_as_likely_and_counted() -> None:
    clock = VirtualClock(95.0)
    sampler = WindowSampler(5, 10.0, clock, random.Random(1))
    clock.sleep(6)  # the first window was not seen whole
    seen: Counter[int] = Counter()
    for _ in range(400):
        for number in range(20):
            at = sampler.arrived(REQUEST)
            clock.sleep(0.5)
            if number % 2 == 0:  # the others come to nothing
                sampler.finished(at, REQUEST, finished(number + 1))
    clock.sleep(10)
    windows = list(sampler.closed())
    assert len(windows) == 12  # older ones had to go: nobody took them
    for window in windows[:-1]:  # the last ended early
        assert window.start_s % 10 == 0
        assert sum(window.arrivals) == 20
        assert len(window.records) == 5
        assert sum(record.weight for record in window.records) == 10
        seen.update(record.input_tokens for record in window.records)
    assert len(seen) == 10


def test_the_sample_is_uniform() -> None:
    seen: Counter[int] = Counter()
    for seed in range(2000):
        clock = VirtualClock(0.0)
        sampler = WindowSampler(3, 10.0, clock, random.Random(seed))
        clock.sleep(10)
        for number in range(12):
            sampler.finished(sampler.arrived(REQUEST), REQUEST, finished(number + 1))
        clock.sleep(10)
        seen.update(record.input_tokens for record in sampler.closed()[0].records)
    assert all(abs(count - 500) < 100 for count in seen.values())
    assert len(seen) == 12


async def test_a_router_reports_its_requests_to_redis(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """Over gRPC and Redis: what tiers a request visited, with tokens and scores; requests to one tier are left out."""
    models = ROOT / "tests" / "planner" / "two-tiers.yaml"
    replan = {
        "enabled": True,
        "cluster": str(ROOT / "examples" / "cluster-4x8-h100.yaml"),
        "models": str(models),
        "trace": str(ROOT / "examples" / "trace.csv"),
        "quality": str(ROOT / "examples" / "judged.csv"),
        "min_quality": 80,
        "window_s": 1.0,
        "sample": 3,
    }
    file = mesh_file(planner={"replan": replan})
    mesh_name = yaml.safe_load(file.read_text())["name"]
    async with running_mesh(file, redis.url) as mesh, mesh.client() as client:
        store = WorkloadStore(mesh.router.redis, mesh.router.keys)
        async with asyncio.timeout(60):
            while True:
                await asyncio.gather(*(client.generate(f"hello {i}") for i in range(6)))
                await client.generate("hello", model="large")
                _, windows = await store.after("0")
                busy = [w for w in windows if len(w.records) == 3]
                if busy:
                    break
        window = busy[0]
        assert sum(window.arrivals) >= 3
        assert all(record.weight >= 1 for record in window.records)
        assert all(window.start_s - 5 < record.arrival_s < window.end_s for record in window.records)
        for record in window.records:
            first = record.visits[0]
            assert isinstance(first, TierVisit)
            assert (first.tier, first.output_tokens > 0) == ("small", True)
            assert first.score is not None
            assert record.input_tokens > 0
        raw = await mesh.router.redis.xrange(f"{mesh_name}:workload")
        assert b"hello" not in repr(raw).encode()
