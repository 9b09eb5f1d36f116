"""The judge as a language model that a tier of the mesh serves: shipped models on the torch engine, end to end."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from openai import AsyncOpenAI

from penstock.judge_service.calibrate import calibrate
from penstock.judge_service.calibration.isotonic import Calibration
from penstock.judge_service.clients.tier_client import TierChat
from penstock.judge_service.compose import read_options
from penstock.judge_service.scorers.llm.extension import LlmScorer
from penstock.judge_service.scorers.llm.grading import expected_grade, grade_question
from penstock.judge_service.scoring.extension import ScorerSite
from penstock.judge_service.scoring.questions import REPLY_TOKENS, TOP_LOGPROBS, Messages
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services.domain.errors import DeadlineExceeded, Overloaded, Unavailable
from penstock.services.domain.instances import InstanceRecord
from penstock.services.mesh_file import load_mesh_file
from penstock.services.settings import ServiceSettings
from penstock.services.state.keys import Keys
from penstock.types.judging import JudgedAnswer
from penstock.types.prompts import TextPrompt
from tests.conftest import FAMILY, MeshFileMaker
from tests.support.held_engine import held_engines
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess

QUESTIONS = ("What is 12 + 30?", "Reverse the order: trout, wing, field", "Sort: 7, 3, 9")
THRESHOLD = 0.2  # the shipped models were not made to grade: they nearly always say 0
PATIENT_S = 600.0  # on a machine that is busy with other work
JUDGE = {"scorers": [{"name": "llm", "kind": "llm", "tier": "large", "timeout_s": PATIENT_S}], "default_scorer": "llm"}


@pytest.fixture(scope="module")
async def mesh(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestMesh]:
    file = tmp_path_factory.mktemp("mesh") / "mesh.yaml"
    tiers = [
        {"name": "small", "model": str(FAMILY / "small"), "threshold": THRESHOLD},
        {"name": "large", "model": str(FAMILY / "large")},
    ]
    router = {"grpc_port": 0, "http_port": 0, "max_active": 2, "judge_timeout_s": 2 * PATIENT_S}
    content = {"name": "tier-judge", "redis_url": redis.url, "tiers": tiers, "judge": JUDGE, "router": router}
    file.write_text(json.dumps(content))  # JSON is YAML
    async with running_mesh(file, redis.url) as running:
        yield running


async def test_the_grades_are_those_that_the_tier_gives(mesh: TestMesh) -> None:
    """What anybody who asks the tier for a grade, over the OpenAI-compatible API, computes from its answer."""
    openai = AsyncOpenAI(base_url=f"{mesh.http}/v1", api_key="unused")
    async with mesh.client() as client:
        for question in QUESTIONS:
            reply = await client.generate(question, temperature=0, max_tokens=60)
            small = await client.generate(question, model="small", temperature=0, max_tokens=60)
            asked = await openai.chat.completions.create(
                model="large",
                messages=grade_question(TextPrompt(f"user: {question}"), small.text),  # type: ignore[arg-type]
                temperature=0,
                max_tokens=REPLY_TOKENS,
                logprobs=True,
                top_logprobs=TOP_LOGPROBS,
            )
            wanted = 100 * expected_grade(asked.choices[0].model_dump()) / 9
            assert reply.tiers[0].score == pytest.approx(wanted, rel=1e-4)
            assert reply.tiers[0].accepted == (wanted >= THRESHOLD)
            assert [t.tier for t in reply.tiers] == (["small"] if wanted >= THRESHOLD else ["small", "large"])


@pytest.mark.slow
async def test_grades_never_wait_behind_the_requests_that_wait_for_them(mesh: TestMesh) -> None:
    """The router takes two requests at a time; all of them are graded all the same."""
    async with mesh.client() as client:
        replies = await asyncio.gather(
            *(client.generate(f"What is {i} + 30?", temperature=0, max_tokens=30) for i in range(8))
        )
    assert all(reply.tiers[0].score is not None for reply in replies)


@pytest.mark.slow
async def test_its_grades_are_calibrated_over_the_running_mesh(mesh: TestMesh, tmp_path: Path) -> None:
    """Not by the time limit of grades in service: all of a batch are asked for at once."""
    content = json.loads(mesh.mesh_file.read_text())
    content["judge"]["scorers"][0]["timeout_s"] = 0.05
    file = tmp_path / "mesh.yaml"
    file.write_text(json.dumps(content))
    rows = [
        {"prompt": f"What is {i} + 1?", "answer": f"Answer: {i + 1 + i % 2}", "good": i % 2 == 0} for i in range(24)
    ]
    samples = tmp_path / "labelled.jsonl"
    samples.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "calibration.json"
    assert "24 samples" in await calibrate(file, "llm", samples, out)
    assert Calibration.read(out).samples == 24


async def test_a_tier_that_nobody_serves_gives_no_grade(redis: RedisProcess) -> None:
    chat = TierChat("nobody", redis.url, Keys("no-such-mesh"), timeout_s=1)
    await chat.start()
    with pytest.raises(Unavailable, match="no worker for grading"):
        await LlmScorer(chat, concurrency=1).score([JudgedAnswer(TextPrompt("p"), "a")])
    await chat.close()


@pytest.mark.parametrize(("share", "replicas", "places"), [(0.25, 1, 2), (0.25, 2, 1), (0.01, 1, 1), (1.0, 2, 4)])
def test_grades_take_a_share_of_the_tiers_places(
    share: float, replicas: int, places: int, mesh_file: MeshFileMaker
) -> None:
    """Over all judges; at least one place each."""
    tiers = [{"name": "small", "model": "sim", "threshold": 50}, {"name": "large", "model": "sim", "max_running": 8}]
    scorer = {"name": "llm", "kind": "llm", "tier": "large", "tier_share": share}
    mesh = load_mesh_file(mesh_file(tiers, judge={"scorers": [scorer], "default_scorer": "llm", "replicas": replicas}))
    site = ScorerSite(mesh, mesh.judge.scorers[0], ServiceSettings.load(redis_url="redis://unused"), {})
    built = read_options(mesh, site.scorer).build(site)
    assert isinstance(built, LlmScorer)
    assert isinstance(built._chat, TierChat)
    assert built._chat._slots_per_worker == places


async def test_the_grades_a_tier_is_asked_for_do_not_grow_with_what_it_has_to_do(
    redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    """However many answers wait for a grade, each worker has as many as it has places for; all are graded in the end."""
    tiers = [
        {"name": "small", "model": "sim-small", "threshold": 50},
        {"name": "large", "model": "sim-l", "workers": 2},
    ]
    file = mesh_file(tiers)
    async with running_mesh(file, redis.url):
        chat = TierChat("large", redis.url, Keys(load_mesh_file(file).name), timeout_s=PATIENT_S, places_per_worker=3)
        await chat.start()
        under_way, most = dict[str, int](), dict[str, int]()
        generate = chat._generate

        async def watched(record: InstanceRecord, request: pb.GenerateRequest) -> Any:
            name = record.instance_id
            under_way[name] = under_way.get(name, 0) + 1
            most[name] = max(most.get(name, 0), under_way[name])
            try:
                return await generate(record, request)
            finally:
                under_way[name] -= 1

        chat._generate = watched  # type: ignore[method-assign]
        grades = await asyncio.gather(*(chat.ask([{"role": "user", "content": f"{i}"}]) for i in range(60)))
        assert len(grades) == 60
        assert most == {"worker-large-0": 3, "worker-large-1": 3}
        assert not chat._active

        async def full(*_: object) -> Any:
            raise Overloaded("full", 3.0)

        chat._generate = full  # type: ignore[method-assign, assignment]
        with pytest.raises(Overloaded):  # and not Unavailable: the judge itself is well
            await chat.ask([{"role": "user", "content": "?"}])

        async def silent(*_: object) -> Any:
            await asyncio.Event().wait()

        chat._generate, chat._timeout_s = silent, 0.05  # type: ignore[method-assign, assignment]
        with pytest.raises(DeadlineExceeded):
            await chat.ask([{"role": "user", "content": "?"}])
        await chat.close()


async def test_a_worker_that_is_gone_or_aborts_the_grade_is_passed_over(
    redis: RedisProcess, mesh_file: MeshFileMaker
) -> None:
    """The next one grades."""
    tiers = [{"name": "small", "model": "sim-small", "threshold": 50}, {"name": "large", "model": "sim-grade"}]
    file = mesh_file(tiers)
    async with running_mesh(file, redis.url) as mesh:
        chat = TierChat("large", redis.url, Keys(load_mesh_file(file).name), timeout_s=PATIENT_S)
        await chat.start()
        async with asyncio.timeout(60):
            while not (workers := chat._view.workers("large")):
                await asyncio.sleep(0.01)
        (real,), asked, grades = workers, list[str](), list[str]()
        gone = replace(real, instance_id="a-gone", address="127.0.0.1:1")
        chat._candidates = lambda _: [gone, real]  # type: ignore[method-assign, assignment]
        generate = chat._generate

        async def watched(record: InstanceRecord, request: pb.GenerateRequest) -> Any:
            asked.append(record.instance_id)
            grades.append(request.request_id)
            return await generate(record, request)

        chat._generate = watched  # type: ignore[method-assign]
        assert (await chat.ask([{"role": "user", "content": "?"}]))["message"]["content"]
        assert asked == ["a-gone", real.instance_id]
        chat._candidates = lambda _: [real]  # type: ignore[method-assign, assignment]
        with held_engines("sim-grade", step_s=5.0):  # the grade takes much longer than it takes to abort it
            asking = asyncio.create_task(chat.ask([{"role": "user", "content": "?"}]))
            async with (
                aio.insecure_channel(mesh.parts["worker-large-0"].admin_address) as channel,
                asyncio.timeout(60),
            ):
                stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
                while len(grades) < 3 or not (await stub.Abort(pb.AbortRequest(request_id=grades[-1]))).aborted:
                    await asyncio.sleep(0.01)
            with pytest.raises(Unavailable, match="the worker aborted the grade"):
                await asking
        await chat.close()


async def test_grades_that_nobody_waits_for_are_not_asked_for() -> None:
    """Where one of several answers has no grade, or the caller goes, the others are taken back."""

    class Slow:
        ended = 0

        async def start(self) -> None: ...

        async def close(self) -> None: ...

        async def ask(self, messages: Messages) -> dict[str, Any]:
            if "fails" in messages[1]["content"]:
                raise Unavailable("no")
            try:
                await asyncio.Event().wait()
            finally:
                self.ended += 1
            raise AssertionError

    chat = Slow()
    answers = [JudgedAnswer(TextPrompt("p"), text) for text in ("a", "b", "fails")]
    with pytest.raises(Unavailable):
        await LlmScorer(chat, concurrency=8).score(answers)
    assert chat.ended == 2
