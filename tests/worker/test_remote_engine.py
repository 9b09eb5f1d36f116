"""A remote tier: endpoints of OpenAI's API behind a worker. The endpoint is another mesh, over real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock import InvalidRequestError, Options, StructuredOutput, Tool
from penstock.services.domain.errors import Overloaded, Unavailable, UnsupportedByModel
from penstock.services.mesh_check import check_mesh_file
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.processes import free_port
from penstock.types.prompts import ChatMessage, ChatPrompt, TextPrompt
from penstock.types.replies import FinishReason, TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.structured import StructuredOutput as Form
from penstock.types.workers import Admitted, EngineFinished
from penstock.worker_service.engine.interface import Capability, EngineUnusable
from penstock.worker_service.engine.remote.engine import RemoteEngine
from penstock.worker_service.engine.remote.extension import OpenAi
from penstock.worker_service.engine.remote.requests import chat_body
from tests.conftest import FAMILY, write_mesh_file
from tests.support.engines import started
from tests.support.held_engine import held_engines
from tests.support.local_http import served
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess
from tests.support.sglang import cpu_shape, launched_server

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
QUESTION = "What is 12 + 30?"
FAST = {"overhead_ms": 0.5, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 12}


@pytest.fixture(scope="module")
async def endpoint(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestMesh]:
    """The mesh behind the remote tiers: a shipped model, and a simulated one that takes tools and forms."""
    tiers: list[dict[str, Any]] = [
        {"name": "small", "model": str(FAMILY / "small"), "threshold": 0, "engine": "torch", "kv_tokens": 4096},
        {"name": "sim", "model": "sim", "engine": "simulated", "simulated": FAST},
    ]
    path = write_mesh_file(tmp_path_factory.mktemp("endpoint"), tiers)
    async with running_mesh(path, redis.url) as running:
        yield running


def engine_over(*endpoints: str, model: str = "m", key: str = "", **options: Any) -> RemoteEngine:
    """An engine over these endpoints."""
    tier = MeshTier(name="remote", model=model, engine="openai")
    return RemoteEngine(tier, OpenAi(endpoints=endpoints, **options), key)


def remote(*endpoints: str, **options: Any) -> AbstractAsyncContextManager[RemoteEngine]:
    """The same, while it runs."""
    return started(engine_over(*endpoints, **options))


@pytest.fixture
async def engine(endpoint: TestMesh) -> AsyncIterator[RemoteEngine]:
    async with remote(f"{endpoint.http}/v1", model="small") as created:
        yield created


def chat(name: str, sampling: SamplingParams = GREEDY, **more: Any) -> GenerationRequest:
    return GenerationRequest(name, ChatPrompt((ChatMessage("user", QUESTION),)), sampling, **more)


async def reply(engine: RemoteEngine, request: GenerationRequest) -> tuple[str, tuple[int, ...], EngineFinished]:
    """(text, tokens, last event); the frames come in order."""
    text, tokens = "", tuple[int, ...]()
    first = len(request.resume_token_ids)
    async for event in engine.generate(request):
        match event:
            case TokenFrame():
                assert event.offset == first + len(tokens)
                text, tokens = text + event.text, tokens + event.token_ids
            case EngineFinished():
                return text, tokens, event
    raise AssertionError("no last event")


async def text_there(endpoint: TestMesh, **options: Any) -> str:
    async with endpoint.client() as client:
        answer = await client.generate(QUESTION, Options(model="small", temperature=0, max_tokens=40, **options))
        return answer.text


async def test_the_text_and_the_usage_are_the_endpoints(engine: RemoteEngine, endpoint: TestMesh) -> None:
    text, tokens, finished = await reply(engine, chat("a"))
    assert text == await text_there(endpoint) != ""
    assert bytes(tokens).decode() == text
    assert finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert 0 < finished.usage.output_tokens <= 40
    assert finished.usage.prompt_tokens > 0
    short, _, cut = await reply(engine, chat("b", replace(GREEDY, max_tokens=2)))
    assert text.startswith(short)
    assert cut.reason is FinishReason.LENGTH
    assert cut.usage.output_tokens == 2


async def test_penalties_and_biases_reach_the_endpoint(engine: RemoteEngine, endpoint: TestMesh) -> None:
    text, _, _ = await reply(engine, chat("a", replace(GREEDY, frequency_penalty=1.5, presence_penalty=1.0)))
    assert text == await text_there(endpoint, frequency_penalty=1.5, presence_penalty=1.0)


async def test_a_stop_string_ends_the_reply_before_it(engine: RemoteEngine) -> None:
    whole, _, _ = await reply(engine, chat("a"))
    stop = whole[1:3]
    text, _, finished = await reply(engine, chat("b", replace(GREEDY, stop=(stop,))))
    assert text == whole[: whole.find(stop)]
    assert (finished.reason, finished.stop) == (FinishReason.STOP, stop)


async def test_a_reply_resumes_where_the_endpoint_writes_the_same(engine: RemoteEngine) -> None:
    whole, tokens, _ = await reply(engine, chat("a"))
    for cut in (1, len(tokens) - 1, len(tokens)):
        rest, _, _ = await reply(engine, chat(f"r{cut}", resume_token_ids=tokens[:cut]))
        assert whole.encode()[cut:].decode() == rest
    with pytest.raises(Unavailable, match="does not write the same reply"):
        await reply(engine, chat("other", resume_token_ids=tuple(b"something else")))


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (replace(GREEDY, top_k=3), "sampling.top_k"),
        (replace(GREEDY, min_p=0.1), "sampling.min_p"),
        (replace(GREEDY, repetition_penalty=1.2), "sampling.repetition_penalty"),
        (replace(GREEDY, stop_token_ids=(3,)), "sampling.stop_token_ids"),
        (replace(GREEDY, ignore_eos=True), "sampling.ignore_eos"),
        (replace(GREEDY, structured_output=Form(regex="a+")), "sampling.structured_output"),
    ],
)
async def test_what_the_endpoint_does_not_have_is_refused_by_name(
    engine: RemoteEngine, sampling: SamplingParams, field: str
) -> None:
    """Before anything is sent; the cascade then passes over the tier."""
    with pytest.raises(UnsupportedByModel, match=f"^{field}: "):
        await reply(engine, chat("a", sampling))


async def test_stated_extensions_reach_the_endpoint(endpoint: TestMesh) -> None:
    extensions = frozenset({"top_k", "min_p", "repetition_penalty", "ignore_eos"})
    async with remote(f"{endpoint.http}/v1", model="small", extensions=extensions) as engine:
        sampling = replace(GREEDY, repetition_penalty=1.7, ignore_eos=True)
        text, _, finished = await reply(engine, chat("a", sampling))
        assert text == await text_there(endpoint, repetition_penalty=1.7, ignore_eos=True)
        assert finished.reason is FinishReason.LENGTH
        hot = SamplingParams(temperature=2.0, top_k=1, max_tokens=40)
        assert (await reply(engine, chat("b", hot)))[0] == await text_there(endpoint)


async def test_only_chats_can_be_sent(engine: RemoteEngine) -> None:
    with pytest.raises(UnsupportedByModel, match="takes chats"):
        await reply(engine, GenerationRequest("a", TextPrompt("x"), GREEDY))


async def test_an_abort_ends_the_reply_here_and_there(endpoint: TestMesh) -> None:
    async with remote(f"{endpoint.http}/v1", model="sim") as engine:
        with held_engines():
            async with aclosing(engine.generate(chat("a"))) as events:
                assert isinstance(await anext(events), Admitted)
                assert engine.load().requests == 1
                assert await engine.abort("a")
                last = [event async for event in events][-1]
        assert isinstance(last, EngineFinished)
        assert last.reason is FinishReason.ABORTED
        assert not await engine.abort("a")
        assert engine.load().requests == 0
    await endpoint.until(lambda status: not any(instance.running for instance in status.instances))


async def test_an_endpoint_that_is_gone_is_passed_over(endpoint: TestMesh) -> None:
    gone = f"http://127.0.0.1:{free_port()}/v1"
    async with remote(gone, f"{endpoint.http}/v1", model="small") as engine:
        texts = {(await reply(engine, chat(f"r{i}")))[0] for i in range(4)}
    assert texts == {await text_there(endpoint)}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "nobody"}, "no model 'nobody' there, but cascade, small, sim"),
        ({"endpoints": ("http://127.0.0.1:9/v1",), "start_timeout_s": 0.1}, "127.0.0.1:9"),
    ],
)
async def test_what_cannot_serve_is_named_at_the_start(
    endpoint: TestMesh, options: dict[str, Any], problem: str
) -> None:
    whole = {"model": "small", "endpoints": (f"{endpoint.http}/v1",)} | options
    with pytest.raises(EngineUnusable, match=problem):
        await engine_over(*whole.pop("endpoints"), **whole).start()


class FaultyServer:
    """An endpoint with the faults that a sound one does not show. answers: (status, headers, chunks), in turn."""

    def __init__(self, answers: list[tuple[int, dict[str, str], list[bytes]]]) -> None:
        self.answers, self.calls = answers, 0
        self.keys, self.bodies = list[str](), list[dict[str, Any]]()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Yields its base URL."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        async with served(app) as url:
            yield f"{url}/v1"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization", ""))
        self.bodies.append(await request.json())
        status, headers, chunks = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        return response


def event(text: str, finish: str | None = None) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": finish}]}).encode() + b"\n\n"
    )


@pytest.mark.parametrize(
    ("status", "headers", "chunks", "kind", "problem"),
    [
        (429, {"Retry-After": "7"}, [b'{"error": {"message": "slow down"}}'], Overloaded, "slow down"),
        (429, {"Retry-After": "nan"}, [], Overloaded, "429"),
        (500, {}, [b"<html>"], Unavailable, "500"),
        (401, {}, [b'{"error": {"message": "wrong key"}}'], Unavailable, "wrong key"),
        (400, {}, [b'{"error": {"message": "no such field"}}'], UnsupportedByModel, "no such field"),
        (200, {}, [event("half")], Unavailable, "ended the stream early"),
        (200, {}, [b"data: {\n\n"], Unavailable, "no JSON object"),
        (200, {}, [b'data: {"error": {"message": "out of memory"}}\n\n'], Unavailable, "out of memory"),
        (200, {}, [b"data: " + b"x" * (5 << 20)], Unavailable, "an event of more than"),
    ],
)
async def test_faults_of_an_endpoint_are_those_of_the_request(
    status: int, headers: dict[str, str], chunks: list[bytes], kind: type[Exception], problem: str
) -> None:
    server = FaultyServer([(status, headers, chunks)])
    async with server.serving() as url, remote(url, key="secret-key") as engine:  # an endpoint without a list of models
        with pytest.raises(kind, match=problem) as caught:
            await reply(engine, chat("a"))
        assert "secret-key" not in str(caught.value) + repr(engine)
        assert server.keys == ["Bearer secret-key"] * 2  # that of the start, too
        if isinstance(caught.value, Overloaded):
            assert caught.value.retry_after_s == (7.0 if headers["Retry-After"] == "7" else 1.0)
        assert engine.load().requests == 0


async def test_what_the_client_does_not_set_is_left_to_the_endpoint() -> None:
    """Its model has defaults of its own, which a value of ours would replace."""
    unset = SamplingParams()
    engine = engine_over("http://127.0.0.1:9/v1")
    request = chat("a", unset).with_defaults(engine.info.sampling_defaults)
    body = chat_body(request, "m", frozenset(), "max_completion_tokens")
    assert set(body) == {"model", "messages", "stream", "stream_options"}
    limited = chat_body(chat("b", replace(unset, max_tokens=5)), "m", frozenset(), "max_completion_tokens")
    assert limited["max_completion_tokens"] == 5


async def test_logprobs_are_the_endpoints(engine: RemoteEngine, endpoint: TestMesh) -> None:
    """A position for each of its tokens, as many more likely ones as are asked for; a part that is resumed has none."""
    async with endpoint.client() as client:
        options = Options(model="small", temperature=0, max_tokens=40, top_logprobs=2)
        there = (await client.generate(QUESTION, options)).logprobs
    assert Capability.LOGPROBS in engine.info.capabilities
    for top in (2, 0):
        request = chat(f"top{top}", replace(GREEDY, top_logprobs=top))
        frames = [event async for event in engine.generate(request) if isinstance(event, TokenFrame)]
        here = [position for frame in frames for position in frame.logprobs]
        written = [position for position in there if position.chosen.token_bytes]
        assert [p.chosen.token_bytes for p in here] == [p.chosen.token_bytes for p in written]
        assert [p.chosen.logprob for p in here] == pytest.approx([p.chosen.logprob for p in written])
        assert {len(position.top) for position in here} == {top}
    whole = bytes(token for frame in frames for token in frame.token_ids)
    resumed = chat(
        "resumed", replace(GREEDY, top_logprobs=0), resume_token_ids=tuple(whole[: len(frames[0].token_ids)])
    )
    rest = [event async for event in engine.generate(resumed) if isinstance(event, TokenFrame)]
    assert sum(len(frame.logprobs) for frame in rest) == len(here) - len(frames[0].logprobs)


async def test_an_endpoint_without_logprobs_is_known_after_the_start() -> None:
    """The judge's wish for the reply's own is left out, a client's for more likely tokens is refused."""
    async with FaultyServer([(200, {}, [event("7", "stop")])]).serving() as url, remote(url) as engine:
        assert Capability.LOGPROBS not in engine.info.capabilities
        assert (await reply(engine, chat("a", replace(GREEDY, top_logprobs=0))))[0] == "7"
        with pytest.raises(UnsupportedByModel, match=r"^sampling.top_logprobs: "):
            await reply(engine, chat("b", replace(GREEDY, top_logprobs=2)))


async def test_an_endpoint_may_refuse_logprobs_of_some_replies() -> None:
    """As llama.cpp's server does of replies with tools: these come without."""
    told = {"content": [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
    delta = {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop", "logprobs": told}]}
    good = [b"data: " + json.dumps(delta).encode() + b"\n\n"]
    server = FaultyServer([(200, {}, good), (400, {}, [b'{"error": {"message": "not with tools"}}']), (200, {}, good)])
    async with server.serving() as url, remote(url) as engine:
        assert (await reply(engine, chat("a", replace(GREEDY, top_logprobs=0))))[0] == "x"
    assert ["logprobs" in body for body in server.bodies] == [True, True, False]


@pytest.mark.sglang
@pytest.mark.timeout(400)
async def test_sglangs_own_port_is_an_endpoint(endpoint: TestMesh, tmp_path: Path) -> None:
    """A server that is no mesh: text, usage, forms. Its greedy text is that of the torch engine at the other endpoint."""
    shape = cpu_shape(FAMILY / "small", kv_tokens=4096, structured_output=True)
    with ExitStack() as stack:
        url = await asyncio.to_thread(stack.enter_context, launched_server(shape, tmp_path / "sglang.log"))
        extensions = frozenset({"top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"})
        async with remote(f"{url}/v1", model=shape.name, extensions=extensions) as engine:
            text, _, finished = await reply(engine, chat("a"))
            assert text == await text_there(endpoint)
            assert finished.usage.output_tokens > 0
            penalized, _, _ = await reply(engine, chat("b", replace(GREEDY, repetition_penalty=1.7, ignore_eos=True)))
            there = await text_there(endpoint, repetition_penalty=1.7, ignore_eos=True)
            # late in nonsense, two engines may round a near tie otherwise
            assert penalized[:30] == there[:30] != text[:30]
            schema = '{"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}'
            form = Form(json_schema=schema)
            shaped, _, _ = await reply(engine, chat("c", replace(GREEDY, structured_output=form, max_tokens=200)))
            assert isinstance(json.loads(shaped)["x"], bool)


async def test_calls_and_reasoning_of_any_server_become_text() -> None:
    """Two calls in pieces, the first without arguments, behind reasoning; usage in an event of its own."""
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "reasoning_content": "Let me"},
        {"reasoning_content": " see."},
        {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "clock", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "id": "y", "function": {"name": "add", "arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": ": 1}"}}]},
    ]
    chunks = [b"data:" + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n" for delta in deltas]
    chunks.append(event("", "tool_calls"))
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    chunks.append(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
    async with FaultyServer([(200, {}, chunks)]).serving() as url, remote(url) as engine:
        text, _, finished = await reply(engine, chat("a"))
    assert text == (
        '<think>Let me see.</think><tool_call>{"name": "clock", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    )
    tokens = (finished.usage.prompt_tokens, finished.usage.cached_prompt_tokens, finished.usage.output_tokens)
    assert tokens == (9, 4, 5)


async def test_a_mesh_with_a_remote_last_tier(redis: RedisProcess, endpoint: TestMesh, tmp_path: Path) -> None:
    """Text, calls and forms of the remote tier are those of the endpoint, with usage and cost by its count."""
    remote = {"engine": "openai", "openai": {"endpoints": [f"{endpoint.http}/v1"]}}
    tiers: list[dict[str, Any]] = [
        {"name": "text", "model": "small", "threshold": 100, **remote},
        {"name": "forms", "model": "sim", **remote},
    ]
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    async with running_mesh(write_mesh_file(tmp_path, tiers), redis.url) as mesh, mesh.client() as client:
        answer = await client.generate(QUESTION, Options(model="text", temperature=0, max_tokens=40))
        assert answer.text == await text_there(endpoint)
        assert answer.usage.output_tokens <= 40
        tool = Tool("double", parameters=parameters)
        called = await client.generate(QUESTION, Options(model="forms", tools=[tool], tool_choice="required"))
        assert called.tool_calls
        assert all(isinstance(json.loads(call.arguments)["x"], int) for call in called.tool_calls)
        form = StructuredOutput(json_schema=parameters)
        shaped = await client.generate(QUESTION, Options(model="forms", structured_output=form, max_tokens=400))
        assert isinstance(json.loads(shaped.text)["x"], int)
        with pytest.raises(InvalidRequestError, match="top_k"):
            await client.generate(QUESTION, Options(model="text", top_k=3))
        many = [client.generate(QUESTION, Options(model="text", temperature=0, max_tokens=40)) for _ in range(8)]
        assert {one.text for one in await asyncio.gather(*many)} == {answer.text}


async def test_two_endpoints_and_a_threshold_are_a_cascade(
    redis: RedisProcess, endpoint: TestMesh, tmp_path: Path
) -> None:
    """No judge section: by the log-probabilities of an endpoint that gives some, by a grade of the last tier otherwise."""
    large: dict[str, Any] = {"name": "large", "model": "m", "engine": "openai"}
    grade = [event("8", "stop")]  # whatever is asked, without log-probabilities
    async with FaultyServer([(200, {}, grade)]).serving() as url:
        large["openai"] = {"endpoints": [url]}
        for model, there, scores in (("small", f"{endpoint.http}/v1", (70.0, 74.0)), ("m", url, (88.8, 89.0))):
            small = {"name": "small", "model": model, "engine": "openai", "openai": {"endpoints": [there]}}
            path, router = tmp_path / f"{model}.yaml", {"grpc_port": 0, "http_port": 0}
            path.write_text(json.dumps({"name": model, "tiers": [small | {"threshold": 60}, large], "router": router}))
            async with running_mesh(path, redis.url) as mesh, mesh.client() as client:
                answer = await client.generate(QUESTION, Options(temperature=0, max_tokens=40))
            assert (answer.tier, len(answer.tiers)) == ("small", 1)
            assert answer.tiers[0].score is not None
            assert scores[0] < answer.tiers[0].score < scores[1]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "tiers[0].openai.endpoints"),
        ({"endpoints": ["127.0.0.1:80"]}, "tiers[0].openai.endpoints[0]"),
        ({"endpoints": ["https://me:secret@host/v1"]}, "tiers[0].openai.endpoints[0]"),
        ({"endpoints": ["https://host/v1"], "key_env": "NO_SUCH_KEY_HERE"}, "tiers[0].openai.key_env"),
        ({"endpoints": ["https://host/v1"], "extensions": ["beams"]}, "tiers[0].openai.extensions[0]"),
    ],
)
def test_faults_of_the_mesh_file_are_named(tmp_path: Path, settings: dict[str, Any], field: str) -> None:
    tier = {"name": "remote", "model": "m", "engine": "openai", "openai": settings}
    path = write_mesh_file(tmp_path, [tier])
    assert field in [problem.field for problem in check_mesh_file(path, here=True).problems]
