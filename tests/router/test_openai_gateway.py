"""The OpenAI-compatible API, asked by the official client."""

import asyncio
import json
import re
from typing import Any

import aiohttp
import openai
import pytest

from penstock import NotFoundError
from penstock.router_service.clients.worker_client import WorkerClient
from penstock.router_service.generation.cascade_generation import UNSTREAMED_INTERVAL_S
from penstock.types.requests import GenerationRequest
from tests.conftest import MeshRunner
from tests.support.malformed_http import CHAT, WRONG
from tests.support.mesh import TestMesh
from tests.support.present import present

HELLO: Any = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}


async def test_a_chat_completion_has_openais_shape_and_the_cascades_story(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="cascade", messages=HELLO, temperature=0)
    (choice,) = reply.choices
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    told = (reply.model_extra or {})["penstock"]
    assert told["tier"] == "small"
    assert [(t["tier"], t["accepted"], round(t["score"])) for t in told["tiers"]] == [("small", True, 90)]
    assert len(told["trace_id"]) == 32


async def test_streamed_pieces_join_to_the_whole(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="large", messages=HELLO, temperature=0)
    stream = await client.chat.completions.create(
        model="large", messages=HELLO, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, finish, usage, extra, role = "", None, None, None, None
    async for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        extra = (chunk.model_extra or {}).get("penstock") or extra
        for choice in chunk.choices:
            role = choice.delta.role or role
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert role == "assistant"
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert present(usage).completion_tokens == present(whole.usage).completion_tokens
    assert present(extra)["tier"] == "large"


async def test_logprobs_spell_the_content(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model="large", messages=HELLO, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = reply.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
    streamed = ""
    async for chunk in await client.chat.completions.create(
        model="large", messages=HELLO, temperature=0, logprobs=True, stream=True
    ):
        for piece in chunk.choices:
            if piece.logprobs is not None:
                streamed += "".join(entry.token for entry in piece.logprobs.content or ())
    assert streamed == choice.message.content


async def test_n_choices_are_numbered_and_seeded_apart(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="small", messages=HELLO, n=3, seed=5)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len((reply.model_extra or {})["penstock"]) == 3
    alone = await client.chat.completions.create(model="small", messages=HELLO, seed=5)
    assert alone.choices[0].message.content == reply.choices[0].message.content
    assert present(reply.usage).prompt_tokens == present(alone.usage).prompt_tokens  # the prompt counts once
    texts = {0: "", 1: ""}
    async for chunk in await client.chat.completions.create(model="small", messages=HELLO, n=2, seed=5, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {i: reply.choices[i].message.content for i in (0, 1)}


async def test_stop_and_length_end_a_reply(client: openai.AsyncOpenAI) -> None:
    for i in range(100):  # until one is long enough
        story: Any = [{"role": "user", "content": "x" * i}]
        whole = (await client.chat.completions.create(model="large", messages=story)).choices[0].message.content
        if len(whole or "") > 12:
            break
    assert whole is not None
    stopped = await client.chat.completions.create(model="large", messages=story, stop=whole[4:6])
    assert stopped.choices[0].message.content == whole[: whole.find(whole[4:6])]
    assert stopped.choices[0].finish_reason == "stop"
    short = await client.chat.completions.create(model="large", messages=story, max_completion_tokens=3)
    assert short.choices[0].finish_reason == "length"
    assert present(short.usage).completion_tokens == 3


async def test_content_parts_and_developer_messages_are_taken(client: openai.AsyncOpenAI) -> None:
    plain = await client.chat.completions.create(
        model="large", messages=[{"role": "system", "content": "be brief"}, *HELLO], temperature=0
    )
    parts = await client.chat.completions.create(
        model="large",
        temperature=0,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        ],
    )
    assert parts.choices[0].message.content == plain.choices[0].message.content


async def test_completions_take_text_tokens_and_several_prompts(client: openai.AsyncOpenAI) -> None:
    text = await client.completions.create(model="large", prompt="abc", temperature=0, logprobs=1)
    tokens = await client.completions.create(model="large", prompt=[97, 98, 99], temperature=0)
    several = await client.completions.create(model="large", prompt=["abc", "abd"], temperature=0, n=2)
    assert text.choices[0].text == tokens.choices[0].text == several.choices[0].text
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert present(several.usage).prompt_tokens == 6
    logprobs = present(text.choices[0].logprobs)
    assert "".join(present(logprobs.tokens)) == text.choices[0].text
    assert logprobs.text_offset == list(range(len(text.choices[0].text)))
    assert present(text.usage).completion_tokens <= 16
    streamed = ""
    async for chunk in await client.completions.create(model="large", prompt="abc", temperature=0, stream=True):
        streamed += chunk.choices[0].text
    assert streamed == text.choices[0].text


async def test_tokens_may_wait_at_the_worker_where_nobody_streams_them(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole reply, and of one that is held for the judge; not those that a client reads as they come."""
    asked: list[tuple[str, float | None]] = []
    generate = WorkerClient.generate

    def spied(self: WorkerClient, address: str, request: GenerationRequest, **more: Any) -> Any:
        asked.append((request.request_id.split(":")[1], request.output_interval_s))
        return generate(self, address, request, **more)

    monkeypatch.setattr(WorkerClient, "generate", spied)
    body = {"messages": HELLO, "temperature": 0}
    for model, stream in (("large", True), ("large", False), ("cascade", True)):
        async with session.post("/v1/chat/completions", json=body | {"model": model, "stream": stream}) as response:
            assert response.status == 200
            await response.read()
    assert asked == [("large", None), ("large", UNSTREAMED_INTERVAL_S), ("small", UNSTREAMED_INTERVAL_S)]


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    models = [model.id async for model in client.models.list()]
    assert models == ["cascade", "small", "large"]
    assert (await client.models.retrieve("small")).id == "small"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("huge")


@pytest.mark.parametrize("field", sorted({*WRONG} - {"ebnf"}))
async def test_values_that_no_field_may_have_are_refused_by_its_name(
    session: aiohttp.ClientSession, field: str
) -> None:
    for value in WRONG[field]:
        data = json.dumps(CHAT | {"model": "small", field: value}).encode()
        async with session.post("/v1/chat/completions", data=data, headers=JSON) as response:
            assert response.status == 400, value
            assert (await response.json())["error"]["param"].startswith(field), value


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "body"),
        ({"stop": ""}, "stop[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"logit_bias": {"07": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"stop_token_ids": [100000]}, "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "very high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs.chat_template"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": "not json"}, "guided_json"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ],
)
async def test_a_bad_field_is_named(session: aiohttp.ClientSession, change: dict[str, object], field: str) -> None:
    body = {"model": "small", "messages": HELLO} | change
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert field in error["message"]


async def test_a_client_that_hangs_up_frees_the_engine(run_mesh: MeshRunner) -> None:
    slow = {"overhead_ms": 20.0, "reply_tokens": 10_000}
    tiers = [{"name": "slow", "model": "s", "simulated": slow}]
    async with run_mesh(tiers) as mesh:
        for stream in (True, False):
            async with aiohttp.ClientSession() as session:
                body = {"model": "slow", "messages": HELLO, "stream": stream}
                posting = asyncio.create_task(session.post(f"{mesh.http}/v1/chat/completions", json=body))
                await mesh.until(lambda s: s.active == 1 and s.tiers[0].running == 1)
                if stream:
                    response = await posting
                    await response.content.readline()
                    response.close()
                posting.cancel()
            await mesh.until(lambda s: s.active == 0 and s.tiers[0].running == 0)


async def test_more_choices_than_can_ever_run_at_once_are_a_bad_request(run_mesh: MeshRunner) -> None:
    """400 naming `n`, not 429 for ever; what fits is admitted together, two at a time without a deadlock."""
    router = {"max_active": 6, "max_waiting": 100}
    async with run_mesh(router=router) as mesh, aiohttp.ClientSession(mesh.http) as session:
        body = {"model": "small", "prompt": ["a", "b", "c"], "max_tokens": 5}
        async with session.post("/v1/completions", json=body | {"n": 3}) as refused:
            error = (await refused.json())["error"]
            assert (refused.status, error["param"]) == (400, "n")

        async def four() -> int:
            async with session.post("/v1/completions", json=body | {"prompt": "a", "n": 4}) as served:
                return len((await served.json())["choices"])

        assert await asyncio.gather(*(four() for _ in range(8))) == [4] * 8
        async with mesh.client() as client:
            status = await client.status()
        assert (status.active, status.waiting, status.failed, status.rejected) == (0, 0, 0, 0)


async def series(mesh: TestMesh) -> list[str]:
    """Every series of the router that has a model's name."""
    return [line for line in (await mesh.metrics()).splitlines() if "gen_ai_request_model=" in line]


async def test_names_of_no_model_share_one_label(mesh: TestMesh, session: aiohttp.ClientSession) -> None:
    """What clients choose never becomes a metric's label: bogus names make no more series than one does."""

    async def ask_http(name: str) -> int:
        async with session.post("/v1/chat/completions", json={"model": name, "messages": HELLO}) as response:
            return response.status

    async with mesh.client() as client:

        async def ask_grpc(name: str) -> int:
            with pytest.raises(NotFoundError):
                await client.generate("x", model=name)
            return 404

        assert await ask_http("nobody") == 404
        first = await series(mesh)
        asked = (ask_http(f"bogus-{i}") if i % 2 else ask_grpc(f"bogus-{i}") for i in range(100))
        assert {*await asyncio.gather(*asked)} == {404}
        assert len(await series(mesh)) == len(first) > 0
        for name in ("small", "cascade"):
            await client.generate("x", model=name, max_tokens=2)
    lines = await series(mesh)
    labels = {re.findall(r'gen_ai_request_model="([^"]*)"', line)[0] for line in lines}
    assert {"unknown", "small", "cascade"} <= labels <= {"unknown", "small", "large", "cascade"}
