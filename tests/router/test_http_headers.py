"""Headers and comments around replies over HTTP: request ids, CORS, compression, and streams that have nothing to say yet."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
import yarl

from tests.support.held_engine import held_engines

HELLO = [{"role": "user", "content": "hello"}]
ORIGIN = "https://chat.example"
MESH = {"router": {"heartbeat_s": 0.1, "cors_origins": [ORIGIN]}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "large", "messages": HELLO, "max_tokens": 8} | fields


async def comment(response: aiohttp.ClientResponse) -> None:
    """Read up to the next comment."""
    while not (await response.content.readuntil(b"\n\n")).startswith(b":"):
        pass


async def test_every_response_names_its_request(session: aiohttp.ClientSession) -> None:
    """Replies, streams and errors; the id is that of the reply, and another one each time."""
    ids = set[str]()
    for fields in ({}, {"stream": True}, {"temperature": 3}):
        async with session.post("/v1/chat/completions", json=body(**fields)) as response:
            request_id = response.headers["x-request-id"]
            ids.add(request_id)
            text = await response.text()
            assert response.status == 400 or request_id in text
    async with session.get("/v1/nowhere") as response:
        ids.add(response.headers["x-request-id"])
    assert len(ids) == 4


@pytest.mark.parametrize("model", ["cascade", "large"])
async def test_a_stream_that_waits_has_headers_and_comments(session: aiohttp.ClientSession, model: str) -> None:
    """While the engine computes nothing, the client gets headers and a comment every while; then the reply is as usual."""
    with held_engines() as proceed:
        async with session.post("/v1/chat/completions", json=body(model=model, stream=True)) as response:
            assert response.status == 200
            events = list[str]()
            while sum(event.startswith(":") for event in events) < 2:
                events.append((await response.content.readuntil(b"\n\n")).decode().removesuffix("\n\n"))
            proceed.set()
            events += (await response.text()).split("\n\n")
    data = [event for event in events if event and not event.startswith(":")]
    assert data[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in data[:-1])
    assert json.loads(data[0].removeprefix("data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_pages_of_the_named_origin_may_call(session: aiohttp.ClientSession) -> None:
    """A browser asks first, without a key. Other origins get no permission, and the reply is the same."""
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    for origin, allowed in ((ORIGIN, ORIGIN), ("https://evil.example", None)):
        headers = {"Origin": origin}
        async with session.options("/v1/chat/completions", headers=headers | asks) as response:
            assert response.status == 204
            assert response.headers.get("Access-Control-Allow-Origin") == allowed
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
        for fields in ({}, {"stream": True}, {"temperature": 3}):
            async with session.post("/v1/chat/completions", json=body(**fields), headers=headers) as response:
                assert response.headers.get("Access-Control-Allow-Origin") == allowed
                assert response.headers["Vary"] == "Origin"
                assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
                await response.read()
    async with session.options("/v1/chat/completions") as response:
        assert response.status == 405, "no browser's question"


async def test_large_replies_are_compressed_for_clients_that_read_it(session: aiohttp.ClientSession) -> None:
    replies = []
    for encoding, fields in (
        ("gzip, deflate", {"logprobs": True, "top_logprobs": 20, "n": 4}),
        ("identity", {"logprobs": True, "top_logprobs": 20, "n": 4}),
        ("gzip, deflate", {}),
    ):
        headers = {"Accept-Encoding": encoding}
        async with session.post(
            "/v1/chat/completions", json=body(temperature=0, **fields), headers=headers
        ) as response:
            replies.append((response.headers.get("Content-Encoding"), await response.json()))
    (first, large), (second, plain), (third, _) = replies
    assert (first, second, third) == ("gzip", None, None)
    assert large["choices"] == plain["choices"]


async def test_a_client_that_leaves_takes_no_other_stream_with_it(session: aiohttp.ClientSession) -> None:
    with held_engines() as proceed:
        async with session.post("/v1/chat/completions", json=body(stream=True)) as left:
            await comment(left)
            left.close()
        async with session.post("/v1/chat/completions", json=body(stream=True)) as response:
            await comment(response)
            proceed.set()
            assert (await asyncio.wait_for(response.text(), 60)).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/chat/completions?api-version=1", "/v1/chat%2Fcompletions"]
)
async def test_a_path_is_served_alike_however_it_is_looked_up(session: aiohttp.ClientSession, path: str) -> None:
    """Paths as they are written take a shorter way through aiohttp; with a query, or escaped, the usual one."""
    body = {"model": "small", "messages": HELLO, "max_tokens": 2}
    url = yarl.URL(f"{session._base_url}".rstrip("/") + path, encoded=True)
    headers = {"Origin": ORIGIN}
    async with aiohttp.ClientSession() as plain, plain.post(url, json=body, headers=headers) as response:
        assert response.headers["x-request-id"]
        assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
        answer = await response.json()
        if response.status == 200:
            assert answer["id"].endswith(response.headers["x-request-id"])
        else:
            assert (response.status, "%2F" in path) == (404, True), answer


async def test_a_client_that_waits_to_send_its_body_is_told_to_go_on(session: aiohttp.ClientSession) -> None:
    """`Expect: 100-continue`, as curl sends it with large bodies."""
    body = {"model": "small", "messages": HELLO, "max_tokens": 2}
    async with session.post("/v1/chat/completions", json=body, expect100=True) as response:
        assert response.status == 200
