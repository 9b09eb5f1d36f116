"""The server without a model that the benchmarks put behind other routers, and the client that drives them."""

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from benchmarks import load_client, load_server, peers
from penstock.services.background import end
from penstock.services.processes import free_port


@pytest.fixture
async def url() -> AsyncIterator[str]:
    port = free_port()
    server = asyncio.create_task(load_server.serve(port))
    base = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            try:
                async with session.get(base) as response:
                    assert response.status == 200
                    break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0)
    yield f"{base}/v1"
    await end(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_reply_of_the_load_arrives(url: str, stream: bool) -> None:
    figures = await load_client.run(url, "any", tokens=3, connections=4, replies=10, stream=stream)
    assert (figures["replies"], figures["failed"]) == (10, 0)
    assert bool(figures["first_token_ms"]) == stream


async def test_a_reply_has_the_tokens_that_were_asked_for(url: str) -> None:
    body = {"model": "m", "messages": [], "max_tokens": 5, "a_field_of_some_router": 1}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/chat/completions", json=body) as response:
            whole = await response.json()
        async with session.post(f"{url}/chat/completions", json=body | {"stream": True}) as response:
            lines = [line[6:] async for line in response.content if line.startswith(b"data: ")]
    assert whole["usage"]["completion_tokens"] == 5
    assert whole["choices"][0]["message"]["content"] == load_server.TEXT * 5
    assert lines.pop().strip() == b"[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") for line in lines]
    assert deltas == [load_server.TEXT] * 5 + [None]


def test_a_peer_that_is_not_installed_is_skipped_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    figures = peers.measure(rounds=1)
    assert [f"pip install '{peer.package}'" in figures[peer.name]["skipped"] for peer in peers.PEERS] == [True, True]
