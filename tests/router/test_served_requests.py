"""What a router reports of its requests: lengths for traces, capped; windows of equally likely ones; no text."""

import asyncio
import dataclasses
import json
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app
from penstock.planner_service.files.measured import read_trace
from penstock.router_service.domain.events import RouterRequest
from penstock.router_service.telemetry.recorders import HELD_REQUESTS, RequestRecorder
from penstock.router_service.telemetry.sampling import WindowSampler
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.score_prediction import ScorePredictor
from penstock.services.domain.workload import RequestRecord, TierVisit
from penstock.services.field_problems import from_json
from penstock.services.state.connection import StateUnavailable
from penstock.services.state.served_requests import ServedRequestStore
from penstock.services.state.workload import WorkloadStore
from penstock.types.events import Finished, TierSummary
from penstock.types.mesh_status import ServedRequest
from penstock.types.prompts import TextPrompt
from penstock.types.replies import FinishReason, Usage
from tests.conftest import MeshRunner
from tests.support.questions import replan_question
from tests.support.virtual_clock import VirtualClock
from tests.support.waiting import until_answered

SECRET = "a secret of nobody"


async def test_a_mesh_exports_the_trace_of_what_it_served(run_mesh: MeshRunner, tmp_path: Path) -> None:
    """Over gRPC and Redis: every request of the cascade with its arrival, lengths and tier, and nothing of its text.

    Prompts that begin alike find what the answering tier has cached.
    """
    out = tmp_path / "trace.csv"
    async with run_mesh(router={"kept_requests": 1000}) as mesh, mesh.client() as client:
        began = time.time()
        replies = []
        for i in range(6):
            replies.append(await client.generate(f"{SECRET * 9} {'x' * i}"))
            await asyncio.sleep(0.05)
        await client.generate(SECRET, model="large")

        async def all_kept() -> bool:
            return len((await client.served_requests())[0]) == 6

        await until_answered(all_kept)
        kept, token = await client.served_requests()
        kept.reverse()  # newest first
        assert token == ""
        assert [r.tier for r in kept] == [reply.tier for reply in replies]
        assert [r.output_tokens for r in kept] == [reply.usage.output_tokens for reply in replies]
        assert [r.prompt_tokens for r in kept] == [reply.tiers[0].usage.prompt_tokens for reply in replies]
        assert [r.cached_prompt_tokens for r in kept] == [reply.usage.cached_prompt_tokens for reply in replies]
        assert any(r.cached_prompt_tokens for r in kept)
        assert all(began - 1 < r.arrival_s < time.time() for r in kept)
        assert sorted(kept, key=lambda r: r.arrival_s) == kept
        call = ["export-trace", "--out", str(out), "--admin", mesh.router.admin_address]
        done = await asyncio.to_thread(CliRunner().invoke, app, call)
        assert done.exit_code == 0, done.output
        trace = read_trace(out)
        assert len(trace) == 6
        assert trace.arrival_s[0] == 0
        assert trace.cached_tokens.tolist() == [r.cached_prompt_tokens for r in kept]
        assert trace.arrival_s[-1] == pytest.approx(kept[-1].arrival_s - kept[0].arrival_s, abs=1e-4)
        raw = repr(await mesh.router.redis.xrange(mesh.router.keys.requests)) + out.read_text()
        assert "secret" not in raw
        with pytest.raises(penstock.InvalidRequestError, match="page_token"):
            await client.served_requests("0-0 COUNT 1")


async def test_without_the_setting_nothing_is_kept(run_mesh: MeshRunner) -> None:
    async with run_mesh() as mesh, mesh.client() as client:
        await client.generate("hello")
        await asyncio.sleep(1.2)
        assert not await mesh.router.redis.exists(mesh.router.keys.requests)
        with pytest.raises(penstock.PenstockError, match="kept_requests"):
            await client.served_requests()
        call = ["export-trace", "--admin", mesh.router.admin_address]
        done = await asyncio.to_thread(CliRunner().invoke, app, call)
        assert done.exit_code == 1


async def test_the_store_is_capped_and_read_in_pages(run_mesh: MeshRunner) -> None:
    async with run_mesh() as mesh:
        store = ServedRequestStore(mesh.router.redis, mesh.router.keys, 500)
        for i in range(0, 3000, 100):
            await store.append([ServedRequest(j / 10, j + 1, 7, "small") for j in range(i, i + 100)])
        found, token, pages = list[ServedRequest](), "", 0
        while pages == 0 or token:
            page, token = await store.page(token, 64)
            assert len(page) <= 64
            found, pages = found + page, pages + 1
        assert 500 <= len(found) < 700  # whole nodes of 100 entries
        assert [each.prompt_tokens for each in found] == list(range(3000, 3000 - len(found), -1))
        for token in ("x", "1", "-", "1-1 ", f"{2**64}-0", "\u0661-\u0661"):
            with pytest.raises(InvalidRequest, match="page_token"):
                await store.page(token, 10)


async def test_versions_of_routers_read_each_others_requests(run_mesh: MeshRunner) -> None:
    """A row has the four values that earlier versions read, whatever is kept besides; unknown values are passed over."""
    async with run_mesh() as mesh:
        client, key = mesh.router.redis, mesh.router.keys.requests
        store, kept = ServedRequestStore(client, mesh.router.keys, 500), ServedRequest(2.5, 100, 9, "large", 75)
        await store.append([kept])
        written: Any = await client.xrange(key)
        assert ServedRequest(*json.loads(written[0][1][b"r"])) == replace(kept, cached_prompt_tokens=0)
        entries: tuple[dict[Any, Any], ...] = (
            {"r": '[1.5, 10, 3, "small"]'},
            {"r": '[1.5, 10, 3, "small", 4, "later"]', "cached": "6", "unknown": "x"},
            {"r": "[1.5, 10]"},
            {"unknown": "x"},
        )
        for entry in entries:
            await client.xadd(key, entry)
        found, token = await store.page("", 10)
        small = ServedRequest(1.5, 10, 3, "small")
        assert (found, token) == ([replace(small, cached_prompt_tokens=6), small, kept], "")


class _Unreachable(ServedRequestStore):
    """A store whose Redis cannot be reached until `up`."""

    def __init__(self) -> None:
        self.up, self.written, self.failed = False, list[ServedRequest](), asyncio.Event()

    async def append(self, requests: "tuple[ServedRequest, ...] | list[ServedRequest]") -> None:  # type: ignore[override]
        if not self.up:
            self.failed.set()
            raise StateUnavailable("down")
        self.written += requests


async def test_cached_tokens_are_a_share_of_the_first_tiers_prompt() -> None:
    """The tier that answers counts other tokens than the first one; entries of an earlier version have none."""
    store, first, answering = _Unreachable(), Usage(100, 0, 7), Usage(60, 45, 9)
    store.up = True
    tiers = (
        TierSummary("small", "m", "i", 10.0, 50.0, False, first, 0.1),
        TierSummary("large", "m", "i", None, None, True, answering, 0.1),
    )
    done = Finished(FinishReason.STOP, "large", answering, tiers, 0.1, 2.0, "t")
    async with RequestRecorder(store, VirtualClock(100.0)) as recorder:
        recorder.finished(REQUEST, done)
    assert store.written == [ServedRequest(98.0, 100, 9, "large", 75)]
    assert ServedRequest(98.0, 100, 9, "large").cached_prompt_tokens == 0


async def test_what_redis_cannot_take_yet_is_held_up_to_a_limit() -> None:
    """The newest are held, in order, each written once, at the end at the latest; other requests are not recorded."""
    store, clock, done = _Unreachable(), VirtualClock(100.0), finished(3)
    async with RequestRecorder(store, clock) as recorder:
        for _ in range(HELD_REQUESTS + 2500):
            clock.sleep(1.0)
            recorder.finished(REQUEST, done)
            recorder.finished(replace(REQUEST, model="small"), done)
        await asyncio.wait_for(store.failed.wait(), 60)
        store.up = True
    arrivals = [each.arrival_s for each in store.written]
    newest = 100.0 + HELD_REQUESTS + 2500 - 2.0
    assert arrivals == [newest - HELD_REQUESTS + 1 + i for i in range(HELD_REQUESTS)]
    assert store.written[0] == ServedRequest(arrivals[0], 3, 7, "small")


REQUEST = RouterRequest("r", "cascade", TextPrompt("secret"), None, 0.0)  # type: ignore[arg-type]


def finished(tokens: int) -> Finished:
    tier = TierSummary("small", "m", "i", 80.0, 50.0, True, Usage(tokens, 0, 7), 0.1)
    return Finished(FinishReason.STOP, "small", tier.usage, (tier,), 0.1, 2.0, "t")


def test_every_request_of_a_window_is_as_likely_and_counted() -> None:
    clock = VirtualClock(95.0)
    sampler = WindowSampler(5, 10.0, clock, random.Random(1))
    clock.sleep(6)  # the first window was not seen whole
    seen: Counter[int] = Counter()
    for _ in range(400):
        for number in range(20):
            sampler.arrived(REQUEST)
            clock.sleep(0.5)
            if number % 2 == 0:  # the others come to nothing
                sampler.finished(REQUEST, finished(number + 1))
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
            sampler.finished(REQUEST, finished(number + 1))
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
    sampler.finished(REQUEST, event)
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


async def test_a_router_reports_its_requests_to_redis(run_mesh: MeshRunner, tmp_path: Path) -> None:
    """Over gRPC and Redis: what tiers a request visited, with tokens and scores, and what was predicted; requests to one
    tier are left out."""
    predictor = ScorePredictor(("small",), 2**16, (3.0,), {}, 100, (1.0,))
    (tmp_path / "predictor.json").write_text(predictor.to_json())
    tiers = [{"name": "small", "model": "sim-small", "threshold": 50, "skip_below": 1}, {"name": "large", "model": "l"}]
    router = {"score_predictor": "predictor.json"}
    replan = {
        "enabled": True,
        "question": str(replan_question(tmp_path, min_quality=80)),
        "window_s": 1.0,
        "sample": 3,
    }
    async with run_mesh(tiers, planner={"replan": replan}, router=router) as mesh, mesh.client() as client:
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
        raw = await mesh.router.redis.xrange(mesh.router.keys.workload)
        assert b"hello" not in repr(raw).encode()
