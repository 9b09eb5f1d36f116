"""/tokenize, /detokenize, /version and /v1/embeddings."""

from typing import Any

import aiohttp
import pytest

import penstock
from penstock.types.prompts import ChatMessage, ChatPrompt, TextPrompt
from penstock.worker_service.text.hf import HfTokenizer
from tests.conftest import FAMILY
from tests.support.mesh import TestMesh

SHIPPED = HfTokenizer(FAMILY / "small")
TIER = {"name": "small", "model": str(FAMILY / "small"), "engine": "torch", "kv_tokens": 1024}
MESH = {"tiers": [TIER], "judge": {"replicas": 0}}
LONG = "Sort: 9, 3, 40. " * 2_000  # more than a thread is worth, and more than the model's context


async def post(mesh: TestMesh, path: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(f"{mesh.http}{path}", json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("model", ["small", "cascade"])
@pytest.mark.parametrize("text", ["What is 12 + 30?", "grüße 🙂", LONG, "a b" * 20_000])
async def test_tokens_are_those_of_the_models_tokenizer(mesh: TestMesh, model: str, text: str) -> None:
    """As /v1/completions and chat would compute them; a text may be longer than the context."""
    chat = ChatPrompt((ChatMessage("user", text),))
    for body, prompt in (
        ({"prompt": text}, TextPrompt(text)),
        ({"messages": [{"role": "user", "content": text}]}, chat),
    ):
        status, reply = await post(mesh, "/tokenize", {"model": model} | body)
        assert status == 200, reply
        assert reply["tokens"] == SHIPPED.encode(prompt)
        assert reply["count"] == len(reply["tokens"])
        assert reply["max_model_len"] == 1024
    plain = SHIPPED.encode_text(text)
    status, reply = await post(mesh, "/detokenize", {"model": model, "tokens": plain})
    assert (status, reply) == (200, {"prompt": text})


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/tokenize", {"model": "small"}, 400, "prompt"),
        ("/tokenize", {"model": "small", "prompt": ""}, 400, "prompt"),
        ("/tokenize", {"model": "small", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ("/tokenize", {"model": "small", "prompt": "x", "add_special_tokens": False}, 400, "add_special_tokens"),
        ("/tokenize", {"model": "small", "messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
        ("/tokenize", {"model": "nobody", "prompt": "x"}, 404, "model"),
        ("/detokenize", {"model": "small", "tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"model": "small", "tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"model": "small"}, 400, "tokens"),
        ("/v1/embeddings", {"model": "small", "input": "x"}, 404, "model"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(mesh: TestMesh, path: str, body: Any, status: int, field: str) -> None:
    got, reply = await post(mesh, path, body)
    assert (got, reply["error"]["param"]) == (status, field)


async def test_the_version_is_that_of_the_package(mesh: TestMesh) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{mesh.http}/version") as response:
        assert await response.json() == {"version": penstock.__version__}
