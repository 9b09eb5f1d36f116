"""What a router reports about its requests: every one equally likely, whole windows, no text."""

import asyncio
import dataclasses
import json
import random
from collections import Counter
from pathlib import Path

import yaml

from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.telemetry.sampling import WindowSampler
from penstock.services.domain.score_prediction import ScorePredictor
from penstock.services.domain.workload import RequestRecord, TierVisit
from penstock.services.field_problems import from_json
from penstock.services.state import WorkloadStore
from penstock.types.events import Finished, TierSummary
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason, Usage
from tests.conftest import MeshFileMaker
from tests.support.mesh import running_mesh
from tests.support.questions import replan_question
from tests.support.services import RedisProcess
from tests.support.virtual_clock import VirtualClock

REQUEST = RouterRequest("r", "cascade", TextPrompt("secret"), None, 0.0)  # type: ignore[arg-type]


def finished(tokens: int) -> Finished:
    tier = TierSummary("small", "m", "i", 80.0, 50.0, True, Usage(tokens, 0, 7), 0.1)
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


def test_predicted_scores_and_rejected_answers_are_reported() -> None:
    clock = VirtualClock(0.0)
    sampler = WindowSampler(3, 10.0, clock, random.Random(1))
    clock.sleep(10)
    low = TierSummary("medium", "m", "i", None, 50.0, False, Usage(9, 0, 16), 0.1)
    last = TierSummary("large", "m", "i", None, None, True, Usage(9, 0, 70), 0.1)
    event = Finished(
        FinishReason.STOP, "large", last.usage, (low, last), 0.1, 0.2, "t", predicted={"small": 11.777, "medium": 80.0}
    )
    sampler.finished(sampler.arrived(REQUEST), REQUEST, event)
    clock.sleep(10)
    (window,) = sampler.closed()
    (record,) = window.records
    assert record.predicted == (("small", 11.78), ("medium", 80.0))
    assert record.visits == (TierVisit("medium", 16, None), TierVisit("large", 70, None))
    assert from_json(RequestRecord, json.dumps(dataclasses.asdict(record))) == record
    earlier = {
        "arrival_s": 1.0,
        "input_tokens": 2,
        "visits": [{"tier": "a", "output_tokens": 3, "score": 4.0}],
        "weight": 5.0,
    }
    assert from_json(RequestRecord, json.dumps(earlier)) == RequestRecord(1.0, 2, (TierVisit("a", 3, 4.0),), 5.0)


async def test_a_router_reports_its_requests_to_redis(
    redis: RedisProcess, mesh_file: MeshFileMaker, tmp_path: Path
) -> None:
    """Over gRPC and Redis: what tiers a request visited, with tokens and scores, and what was predicted; requests to one
    tier are left out."""
    predictor = ScorePredictor(("small",), 2**16, (3.0,), {}, 100, (1.0,))
    (tmp_path / "predictor.json").write_text(predictor.to_json())
    tiers = [{"name": "small", "model": "sim-small", "threshold": 50, "skip_below": 1}, {"name": "large", "model": "l"}]
    router = {"grpc_port": 0, "http_port": 0, "score_predictor": "predictor.json"}
    replan = {
        "enabled": True,
        "question": str(replan_question(tmp_path, min_quality=80)),
        "window_s": 1.0,
        "sample": 3,
    }
    file = mesh_file(tiers, planner={"replan": replan}, router=router)
    mesh_name = yaml.safe_load(file.read_text())["name"]
    async with running_mesh(file, redis.url) as mesh, mesh.client() as client:
        store = WorkloadStore(mesh.router.redis, mesh.router.keys)
        async with asyncio.timeout(60):
            while True:
                await asyncio.gather(*(client.generate(f"hello {i}") for i in range(6)))
                await client.generate("hello", model="large")
                _, windows = await store.after("0")
                busy = [w for w in windows if len(w.records) == 3 <= sum(w.arrivals)]
                if busy:
                    break
        window = busy[0]
        assert all(record.weight >= 1 for record in window.records)
        assert all(window.start_s - 5 < record.arrival_s < window.end_s for record in window.records)
        for record in window.records:
            first = record.visits[0]
            assert isinstance(first, TierVisit)
            assert (first.tier, first.output_tokens > 0) == ("small", True)
            assert first.score is not None
            assert record.input_tokens > 0
            assert record.predicted == (("small", round(predictor.predict("hello")["small"], 2)),)
        raw = await mesh.router.redis.xrange(f"{mesh_name}:workload")
        assert b"hello" not in repr(raw).encode()
