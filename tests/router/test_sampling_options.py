"""Sampling options and reasoning over HTTP and gRPC, on real models."""

import shutil
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from penstock import Options
from penstock.worker_service.text.hf import HfTokenizer
from tests.conftest import FAMILY, write_mesh_file
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess

HELLO: Any = [{"role": "user", "content": "Count from 3 to 31 by 4."}]
REASONING = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
async def mesh(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestMesh]:
    """Two tiers of the shipped small model; the second one's template opens the reasoning unless it is switched off."""
    folder = tmp_path_factory.mktemp("sampling")
    reasons = folder / "reasons"
    shutil.copytree(FAMILY / "small", reasons)
    template = reasons / "chat_template.jinja"
    template.write_text(template.read_text() + REASONING)
    engine = {"engine": "torch", "kv_tokens": 2048}
    plain = {"name": "plain", "model": str(FAMILY / "small"), "threshold": 0, **engine}
    tiers = [plain, {"name": "reasons", "model": str(reasons), **engine}]
    async with running_mesh(write_mesh_file(folder, tiers), redis.url) as running:
        yield running


TOKENIZER = HfTokenizer(FAMILY / "small")
(SPACE,) = TOKENIZER.encode_text(" ")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 1.9},
    {"logit_bias": {str(SPACE): -100.0}},
    {"ignore_eos": True, "max_tokens": 150},
)


async def test_every_option_changes_the_reply_and_is_the_same_over_http_and_grpc(
    mesh: TestMesh, client: openai.AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
    plain = (await client.chat.completions.create(model="plain", messages=HELLO, **asked)).choices[0].message.content
    async with mesh.client() as sdk:
        assert plain
        for option in (*OPTIONS, {"stop_token_ids": list(TOKENIZER.encode_text(plain[0]))}):
            body = asked | option
            reply = await client.chat.completions.create(model="plain", messages=HELLO, extra_body=body)
            assert reply.choices[0].message.content != plain, option
            native = {"logit_bias": {SPACE: -100.0}} if "logit_bias" in option else {}
            answer = await sdk.generate(HELLO, Options(model="plain", **(body | native)))
            assert answer.text == reply.choices[0].message.content, option


async def test_min_p_of_one_leaves_the_most_likely_token(client: openai.AsyncOpenAI) -> None:
    greedy = await client.chat.completions.create(model="plain", messages=HELLO, temperature=0, max_tokens=40)
    cut = await client.chat.completions.create(
        model="plain", messages=HELLO, temperature=2, max_tokens=40, extra_body={"min_p": 1.0}
    )
    assert cut.choices[0].message.content == greedy.choices[0].message.content


async def test_reasoning_is_apart_from_the_answer(client: openai.AsyncOpenAI) -> None:
    """This model never ends its reasoning: all of its reply is reasoning, whole and streamed, until it is switched off."""
    asked: dict[str, Any] = {"model": "reasons", "messages": HELLO, "temperature": 0, "max_tokens": 30}
    message = (await client.chat.completions.create(**asked)).choices[0].message
    assert message.content == ""
    reasoning = (message.model_extra or {})["reasoning_content"]
    assert reasoning
    parts, content = "", ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            parts += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            content += choice.delta.content or ""
    assert (parts, content) == (reasoning, "")
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    for body in (off, {"reasoning_effort": "none"}):
        message = (await client.chat.completions.create(**asked, extra_body=body)).choices[0].message
        assert message.content
        assert "reasoning_content" not in (message.model_extra or {})


async def test_a_tier_that_cannot_reason_is_passed_over(client: openai.AsyncOpenAI) -> None:
    """Asked for alone it is a 400 that names the field; in the cascade, a tier whose model reasons answers."""
    on: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="plain", messages=HELLO, max_tokens=5, extra_body=on)
    assert refused.value.param == "chat_template_kwargs.enable_thinking"
    reply = await client.chat.completions.create(model="cascade", messages=HELLO, max_tokens=5, extra_body=on)
    assert (reply.model_extra or {})["penstock"]["tier"] == "reasons"
