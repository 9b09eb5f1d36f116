"""A rejected answer becomes the draft of the next tier, and so does a prediction: real services, simulated engines."""

import io
import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest
from grpc import aio
from rich.console import Console

from penstock import AsyncClient, Finished, Reply
from penstock.cli import ask, top
from penstock.client.errors import InvalidRequestError
from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2, worker_pb2_grpc
from penstock.router_service.generation.attempt import _draft_for
from penstock.types.mesh_status import Trace
from penstock.types.prompts import TextPrompt
from penstock.types.requests import MAX_DRAFT_CHARS, MAX_DRAFT_TOKENS, Draft, GenerationRequest
from penstock.types.sampling import SamplingParams
from tests.support.measured import trace_with
from tests.support.mesh import Stub, TestMesh
from tests.support.present import present
from tests.support.scripted_worker_servicer import Act, Script, ScriptedWorker
from tests.support.simulated_text import simulated_texts
from tests.support.tier_scene import Scene

PROMPT, LENGTH = "hello", 60
TEXT = simulated_texts({PROMPT: LENGTH})[PROMPT]
ENDLESS = {"overhead_ms": 1.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}
TIERS: list[dict[str, Any]] = [
    {"name": "small", "model": "sim-small", "threshold": 100, "simulated": ENDLESS},
    {"name": "middle", "model": "sim-middle", "threshold": 100, "simulated": ENDLESS, "escalation_drafts": False},
    {"name": "large", "model": "sim-large", "simulated": ENDLESS},
]


MESH = {"tiers": TIERS, "router": {"trace_share": 1.0, "judge_timeout_s": 60}}
"""Tiers whose answers are never accepted, but for the last; the middle one gets no rejected answers."""


async def reply(client: AsyncClient, **options: Any) -> Reply:
    return await client.generate(PROMPT, temperature=0.0, max_tokens=LENGTH, **options)


async def test_the_next_tier_verifies_a_rejected_answer(mesh: TestMesh) -> None:
    """The answer is as without a draft, in fewer steps. The tier whose setting is off generates its own, without any."""
    async with mesh.client() as client:
        got = await reply(client)
    assert got.text == TEXT
    small, middle, large = got.tiers
    for tier in (small, middle):
        assert (tier.usage.accepted_draft_tokens, tier.usage.rejected_draft_tokens) == (0, 0)
    assert large.usage.accepted_draft_tokens > 0.8 * LENGTH
    assert got.usage == large.usage


async def test_it_is_counted_for_metrics_and_status(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        before = {tier.name: tier.accepted_draft_tokens for tier in (await client.status()).tiers}
        accepted = (await reply(client)).usage.accepted_draft_tokens
        assert accepted > 0
        after = {tier.name: tier.accepted_draft_tokens for tier in (await client.status()).tiers}
    assert after == before | {"large": before["large"] + accepted}
    page = await mesh.metrics()
    lines = [line for line in page.splitlines() if line.startswith("penstock_router_draft_tokens_total{")]
    (line,) = [line for line in lines if 'penstock_outcome="accepted"' in line]
    assert 'penstock_tier="large"' in line
    assert float(line.rpartition(" ")[2]) == after["large"]


async def test_a_prediction_is_the_draft_of_every_tier_until_there_is_a_better_one(mesh: TestMesh) -> None:
    """Also of a tier that gets no rejected answers; over gRPC. A wrong one changes nothing."""
    async with mesh.client() as client:
        got = await reply(client, prediction=TEXT)
        assert got.text == TEXT
        assert [tier.usage.accepted_draft_tokens > 0.8 * LENGTH for tier in got.tiers] == [True, True, True]
        wrong = await reply(client, prediction="nothing of the kind " * 20, model="large")
        assert wrong.text == TEXT
        with pytest.raises(InvalidRequestError, match="prediction: must have at most"):
            await reply(client, prediction="a" * (MAX_DRAFT_CHARS + 1))


async def test_openais_prediction_and_usage(client: openai.AsyncOpenAI) -> None:
    """The request's field as a text and as parts, streamed or not; the counts are in the usage under OpenAI's names."""
    messages: Any = [{"role": "user", "content": PROMPT}]
    options: Any = {"model": "large", "messages": messages, "temperature": 0, "max_tokens": LENGTH}
    for content in (TEXT, [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]):
        prediction: Any = {"type": "content", "content": content}
        got = await client.chat.completions.create(**options, prediction=prediction)
        assert got.choices[0].message.content == TEXT
        stream = await client.chat.completions.create(
            **options, prediction=prediction, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        for usage in (got.usage, chunks[-1].usage):
            details = present(present(usage).completion_tokens_details)
            # How many tokens a step verifies depends on the measured time of a row, so the counts may differ by a few.
            assert (details.accepted_prediction_tokens or 0) > 0.8 * LENGTH
            assert details.rejected_prediction_tokens is not None
    plain = await client.chat.completions.create(**options)
    assert present(present(plain.usage).completion_tokens_details).accepted_prediction_tokens == 0


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("a text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": "a" * (MAX_DRAFT_CHARS + 1)}, "prediction.content"),
        ({"type": "image", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": "a", "more": 1}, "prediction.more"),
    ],
)
async def test_a_prediction_that_is_none_is_refused_by_name(
    session: aiohttp.ClientSession, prediction: Any, field: str
) -> None:
    body = {"model": "large", "messages": [{"role": "user", "content": PROMPT}], "prediction": prediction}
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert field in f"{error['param']} {error['message']}"


def is_complete(trace: Trace) -> bool:
    """Whether the span of the last tier and those of all workers have arrived."""
    of_workers = [span for span in trace.spans if "gen_ai.usage.output_tokens" in span.attributes]
    return len(of_workers) == len(TIERS) and any(span.name == "tier large" for span in trace.spans)


async def test_no_draft_is_in_logs_or_traces(mesh: TestMesh, caplog: pytest.LogCaptureFixture) -> None:
    """It is what a user has sent, or an answer to that."""
    secret = "the launch code is 0000"
    caplog.set_level(logging.DEBUG)
    async with mesh.client() as client:
        got = await reply(client, prediction=secret, trace=True)
        assert got.trace_id
        trace = await trace_with(client, got.trace_id, is_complete)
    assert secret not in repr(trace)
    assert secret not in caplog.text
    assert TEXT not in repr(trace)


async def test_a_reply_that_fails_over_brings_its_draft_and_its_tokens(scene: Scene) -> None:
    """Each instance gets the draft in its own form: its tokenizer's tokens, or text; one that takes none gets none."""
    for name, digest, takes_drafts in (("a", "t", True), ("b", "other", True), ("c", "t", False), ("d", "t", True)):
        scripts: list[Script] = [[5, Act.DIE]] if name != "d" else []
        worker = await scene.start(name, *scripts)
        worker.tokenizer_digest, worker.takes_drafts = digest, takes_drafts
        scene.hear(worker)
    scene.policy = type(scene.policy)(tier_wait_s=0.0, max_attempts=8, max_refusals=8, max_deaths=8)
    draft = Draft("the text", (1, 2, 3), "t")
    assert (await scene.reply(draft=draft)).instances == ["a", "b", "c", "d"]
    sent = [scene.workers[name].asked[0] for name in "abcd"]
    assert [len(request.resume_token_ids) for request in sent] == [0, 5, 10, 15]
    assert [request.draft.WhichOneof("content") for request in sent] == ["token_ids", "text", None, "token_ids"]
    assert (list(sent[3].draft.token_ids.ids), sent[3].draft.tokenizer_digest) == ([1, 2, 3], "t")
    assert sent[1].draft.text == "the text"
    assert not sent[2].HasField("draft")


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (Draft("text", (1, 2), "t"), Draft("", (1, 2), "t")),
        (Draft("text", (1, 2), "u"), Draft("text")),
        (Draft("", (1, 2), "u"), None),
        (Draft("text"), Draft("text")),
        (None, None),
    ],
)
def test_the_form_of_a_draft(draft: Draft | None, expected: Draft | None) -> None:
    worker = ScriptedWorker("w", tokenizer_digest="t", takes_drafts=True)  # type: ignore[abstract]
    request = GenerationRequest("r", TextPrompt("p"), SamplingParams(), draft=draft)
    assert _draft_for(worker.record, request) == expected


def test_a_long_answer_is_a_draft_as_far_as_one_may_be_long() -> None:
    """What a router hands up is never refused."""
    limited = Draft("a" * (2 * MAX_DRAFT_CHARS), (1,) * (2 * MAX_DRAFT_TOKENS), "t").limited
    assert not [*limited.problems("draft")]
    assert (len(limited.text), len(limited.token_ids)) == (MAX_DRAFT_CHARS, MAX_DRAFT_TOKENS)


async def test_the_terminal_shows_what_came_of_drafts(mesh: TestMesh) -> None:
    """In `penstock top`, a column with the accepted of all verified draft tokens; in `penstock ask`, those of the answer."""
    async with mesh.client() as client:
        finished = [event async for event in client.stream(PROMPT, temperature=0.0, max_tokens=LENGTH)][-1]
        status = await client.status()
    assert isinstance(finished, Finished)
    assert f"{finished.usage.accepted_draft_tokens} from a draft" in ask._summary(finished)
    (large,) = [tier for tier in status.tiers if tier.name == "large"]
    verified = large.accepted_draft_tokens + large.rejected_draft_tokens
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(top.screen(status, deque()))
    shown = console.export_text()
    assert "drafted" in shown
    assert f"{large.accepted_draft_tokens}/{verified}" in shown
    undrafted = tuple(replace(t, accepted_draft_tokens=0, rejected_draft_tokens=0) for t in status.tiers)
    console.print(top.screen(replace(status, tiers=undrafted), deque()))
    assert "drafted" not in console.export_text()


class TestWorker:
    """A worker's own part of it: over gRPC, with the metrics that it shows."""

    @pytest.fixture
    async def stub(self, mesh: TestMesh) -> AsyncIterator[Stub]:
        async with aio.insecure_channel(mesh.parts["worker-large-0"].address) as channel:
            yield worker_pb2_grpc.WorkerServiceStub(channel)

    async def finished(self, stub: Stub, draft: worker_pb2.Draft) -> worker_pb2.EngineFinished:
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        prompt = common_pb2.Prompt(
            chat=common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content=PROMPT)])
        )
        request = worker_pb2.GenerateRequest(request_id="w", prompt=prompt, sampling=sampling, draft=draft)
        return [event async for event in stub.Generate(request)][-1].finished

    async def test_drafts_are_counted_by_what_becomes_of_them(self, mesh: TestMesh, stub: Stub) -> None:
        """Tokens of another tokenizer are ignored, not refused: the model of a tier may change while a request runs."""
        info = await stub.GetInfo(worker_pb2.GetInfoRequest())
        assert worker_pb2.CAPABILITY_DRAFTS in info.capabilities
        ids = common_pb2.TokenIds(ids=TEXT.encode()[:20])
        before = await self.counted(mesh)
        used = await self.finished(stub, worker_pb2.Draft(token_ids=ids, tokenizer_digest=info.tokenizer_digest))
        other = await self.finished(stub, worker_pb2.Draft(token_ids=ids, tokenizer_digest="other"))
        assert used.usage.accepted_draft_tokens > 10
        assert (other.usage.output_tokens, other.usage.accepted_draft_tokens) == (20, 0)
        after = await self.counted(mesh)
        assert {name: after[name] - before.get(name, 0) for name in after} == {"used": 1, "other_tokenizer": 1}

    async def counted(self, mesh: TestMesh) -> dict[str, float]:
        """`penstock.worker.drafts` by outcome."""
        page = await mesh.metrics("worker-large-0")
        lines = [line for line in page.splitlines() if line.startswith("penstock_worker_drafts_total{")]
        return {line.split('penstock_outcome="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in lines}
