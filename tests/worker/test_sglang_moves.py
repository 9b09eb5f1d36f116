"""Two real SGLang servers that share a store: replies move between them, and their spans are part of the request's trace."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from tests.conftest import FAMILY, ROOT, MeshFileMaker
from tests.support.mesh import Stub, running_mesh, served_worker
from tests.support.otlp import Collector, otlp_collector
from tests.support.services import RedisProcess
from tests.support.sglang import sglang_pair
from tests.worker.test_migration import read

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

MODEL = FAMILY / "large"
TOKENS = 500
BEFORE = 60  # tokens at the source before it is told to move the reply
LOADED, HELD, COMPUTED = "penstock.kv.loaded_tokens", "penstock.kv.held_tokens", "penstock.kv.computed_tokens"
TIE = 0.1  # between logprobs: two ways to compute the same KV in bf16 differ by up to as much


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with otlp_collector() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def servers(collector: Collector, folder: Path) -> Iterator[list[str]]:
    flags = ("--enable-trace", "--otlp-traces-endpoint", collector.address)
    with sglang_pair(MODEL, folder, *flags) as urls:
        yield urls


@pytest.fixture(autouse=True)
def exported(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own spans go to the same collector."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may read ahead for longer than a reply should wait for it."""
    monkeypatch.setattr("penstock.worker_service.engine.sglang.moves.AHEAD_S", 60)


@dataclass(frozen=True)
class Worker:
    stub: Stub
    instance_id: str


class Place:
    """Starts workers of one tier, each over a server of its own."""

    def __init__(self, redis: RedisProcess, mesh_file: MeshFileMaker, stack: AsyncExitStack) -> None:
        self._redis, self._mesh_file, self._stack = redis, mesh_file, stack
        self._mesh, self._started = f"moves-{secrets.token_hex(4)}", 0

    async def worker(self, **tier: Any) -> Worker:
        """Start a worker, of the same mesh as the others."""
        file = self._mesh_file([{"name": "only", "model": str(MODEL), **tier}], name=self._mesh)
        self._started += 1
        instance_id = f"worker-{self._started}"
        context = served_worker(file, self._redis.url, instance_id=instance_id)
        stub, chassis = await self._stack.enter_async_context(context)
        return Worker(stub, chassis.instance_id)


@pytest.fixture
async def place(redis: RedisProcess, mesh_file: MeshFileMaker) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(redis, mesh_file, stack)


@pytest.fixture
async def pair(servers: list[str], place: Place) -> tuple[Worker, Worker]:
    one, two = [await place.worker(engine="sglang", sglang={"endpoint": url}) for url in servers]
    for worker in (one, two):  # a server's first request takes seconds
        await read(worker.stub.Generate(asked("first", 0)), "tokens")
    return one, two


def asked(name: str, turns: int, transfer: str = "") -> pb.GenerateRequest:
    """A chat of so many turns before the question, which only `name` has."""
    lines = (ROOT / "models" / "heldout.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "prompt" in row]
    first = sum(name.encode()) % (len(rows) - turns - 1)
    messages = []
    for row in rows[first : first + turns]:
        messages.append(common_pb2.ChatMessage(role="user", content=row["prompt"]))
        messages.append(common_pb2.ChatMessage(role="assistant", content=row["answer"]))
    messages.append(common_pb2.ChatMessage(role="user", content=rows[first + turns]["prompt"]))
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompt = common_pb2.Prompt(chat=common_pb2.ChatPrompt(messages=messages))
    return pb.GenerateRequest(request_id=name, prompt=prompt, sampling=sampling, transfer_id=transfer)


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


async def moved(
    source: Worker, target: Worker, name: str, turns: int, trace: str, lost: Path | None = None
) -> tuple[list[int], list[int], Any]:
    """Tokens made at the source, tokens made at the target, and the source's last report. lost: a store that loses all."""
    metadata = (("traceparent", f"00-{trace}-{secrets.token_hex(8)}-01"),)
    call = source.stub.Generate(asked(name, turns), metadata=metadata)
    first: list[int] = []
    async for event in call:
        first += event.tokens.token_ids
        if len(first) >= BEFORE:
            break
    if lost is not None:
        empty(lost)
    claim = target.stub.Generate(asked(name, turns, transfer=f"t-{name}"), metadata=metadata)
    await read(claim, "alive")
    order = pb.MigrateOutRequest(request_id=name, transfer_id=f"t-{name}", target_instance_id=target.instance_id)
    reports = [report async for report in source.stub.MigrateOut(order, metadata=metadata)]
    rest, last = await read(call)
    there: list[int] = []
    if reports[-1].WhichOneof("event") == "handed_over":
        assert last.handed_over.offset == reports[-1].handed_over.offset == len(first + rest)
        there, end = await read(claim)
        assert end.finished.usage.output_tokens == TOKENS
    return first + rest, there, reports[-1]


async def assert_as_if_whole(source: Worker, name: str, turns: int, tokens: list[int]) -> None:
    """The tokens are those of a reply that stays, up to the first tie: a prompt and a reply fed at once round otherwise."""
    request = asked(name, turns)
    request.request_id = "whole"
    request.sampling.top_logprobs = 5
    positions = [
        at async for event in source.stub.Generate(request) if event.HasField("tokens") for at in event.tokens.logprobs
    ]
    assert len(tokens) == len(positions) == TOKENS
    for token, at in zip(tokens, positions, strict=True):
        if token != at.chosen.token_id:
            logprobs = {candidate.token_id: candidate.logprob for candidate in at.top}
            assert logprobs.get(token, -100.0) > at.chosen.logprob - TIE
            return


async def test_a_reply_moves_and_most_of_its_kv_is_loaded_from_the_store(
    pair: tuple[Worker, Worker], collector: Collector
) -> None:
    source, target = pair
    trace = secrets.token_hex(16)
    here, there, report = await moved(source, target, "long", 6, trace)
    assert report.WhichOneof("event") == "handed_over", report
    assert there
    assert report.handed_over.stall.ToTimedelta().total_seconds() > 0
    ahead = await collector.event("prefix read ahead", trace)
    over = await collector.event("kv taken over", trace)
    assert ahead[LOADED] >= 256
    assert ahead[LOADED] + ahead[COMPUTED] >= over[HELD] - 16  # what was read ahead is not computed again
    assert over[COMPUTED] < len(here)  # not even the reply so far: only what came while the target read
    await assert_as_if_whole(source, "long", 6, here + there)


async def test_what_is_short_or_lost_from_the_store_is_computed(
    pair: tuple[Worker, Worker], folder: Path, collector: Collector
) -> None:
    source, target = pair
    for name, turns in (("short", 0), ("storeless", 6)):
        trace = secrets.token_hex(16)
        here, there, report = await moved(source, target, name, turns, trace, lost=folder / "store")
        assert report.WhichOneof("event") == "handed_over", report
        ahead = await collector.event("prefix read ahead", trace)
        assert ahead[LOADED] == 0
        assert ahead[COMPUTED] > 0
        await assert_as_if_whole(source, name, turns, here + there)


async def test_a_worker_with_other_kv_refuses_and_the_reply_goes_on(pair: tuple[Worker, Worker], place: Place) -> None:
    source, _ = pair
    torch = await place.worker(engine="torch")
    here, there, report = await moved(source, torch, "stays", 1, secrets.token_hex(16))
    assert "layout" in report.not_moved.reason
    assert not there
    assert len(here) == TOKENS


async def test_the_servers_spans_join_the_requests_trace(
    servers: list[str], redis: RedisProcess, mesh_file: MeshFileMaker, collector: Collector
) -> None:
    file = mesh_file([{"name": "only", "model": str(MODEL), "engine": "sglang", "sglang": {"endpoint": servers[0]}}])
    async with running_mesh(file, redis.url) as mesh, mesh.client() as client:
        reply = await client.generate("What is 12 + 30?", temperature=0, max_tokens=20)
        joined = list[str]()
        async with asyncio.timeout(20):
            while not joined:  # spans come in batches, in any order
                found = await collector.of_trace(reply.trace_id, {"penstock-router", "penstock-worker", "sglang"})
                ours = {s.span_id: s for s in found if s.service == "penstock-worker"}
                parents = {s.parent_span_id for s in found if s.service == "sglang"}
                joined = [ours[parent].name for parent in parents if parent in ours]
                await asyncio.sleep(0.05)
    assert joined == ["penstock.worker.v1.WorkerService/Generate"]
