"""Whatever is wrong with an HTTP request, the answer is a 4xx in OpenAI's shape that says what, and it arrives."""

import asyncio
import gzip
import json
import re
import threading
import zlib
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.router_service.openai_gateway import bodies, schema
from penstock.router_service.openai_gateway.bodies import INLINE_BYTES, MAX_BODY_BYTES, RequestBodies
from penstock.router_service.openai_gateway.json_values import MAX_NODES, json_bytes, read_object
from penstock.services.domain.errors import InvalidRequest, PenstockError
from tests.support.local_http import served
from tests.support.mesh import TestMesh
from tests.support.present import present
from tests.support.raw_http import exchange, request_bytes

CHAT = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
SOUND = json.dumps(CHAT).encode()
MESH = {"tiers": [{"name": "small", "model": "sim-s"}]}


def chunked(*chunks: bytes, head: str = "") -> bytes:
    lines = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{head}Transfer-Encoding: chunked\r\n\r\n".encode()
    return lines + b"".join(chunks)


BROKEN: dict[str, tuple[bytes, int]] = {
    "no request at all": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    "no such method": (b"FETCH /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no such version": (b"GET /v1/models HTTP/7.3\r\nHost: x\r\n\r\n", 400),
    "a version after ours": (b"GET /v1/models HTTP/2.0\r\nHost: x\r\n\r\n", 400),
    "a version before ours": (b"GET /v1/models HTTP/0.9\r\nHost: x\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no path": (b"GET  HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "a header without a name": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n: y\r\n\r\n", 400),
    "a header with a NUL": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n", 400),
    "a header with a space": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA B: y\r\n\r\n", 400),
    "a length that is none": (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400),
    "a negative length": (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
    "two lengths": (b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    "a length and chunks": (chunked(b"0\r\n\r\n", head="Content-Length: 5\r\n"), 400),
    "a long request line": (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "a very long request line": (b"GET /" + b"x" * 3_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "a long header": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nA: " + b"y" * 40_000 + b"\r\n\r\n", 431),
    "a long header's name": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"y" * 40_000 + b": a\r\n\r\n", 431),
    "many headers": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 5_000 + b"\r\n", 431),
    "an expectation": (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: coffee\r\n\r\n", 417),
    "a chunk without a size": (chunked(b"xyz\r\n{}\r\n0\r\n\r\n"), 400),
    "a chunk with a negative size": (chunked(b"-2\r\n{}\r\n0\r\n\r\n"), 400),
    "a chunk longer than its size": (chunked(b"2\r\n{}}}}}\r\n0\r\n\r\n"), 400),
    "a bad chunk after a good one": (chunked(b"2\r\n{}\r\n", b"zz\r\n{}\r\n0\r\n\r\n"), 400),
    "a huge chunk size": (chunked(b"f" * 40 + b"\r\n{}\r\n0\r\n\r\n"), 400),
    "an unknown path": (request_bytes(b"", "/v2/nothing", method="GET"), 404),
    "a path that is not UTF-8": (b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a path with broken escapes": (request_bytes(b"", "/v1/models/%zz%ff%00", method="GET"), 404),
    "an unknown model": (request_bytes(b"", "/v1/models/" + "x" * 5_000, method="GET"), 404),
    "a wrong method": (request_bytes(b"", "/v1/chat/completions", method="DELETE"), 405),
    "OPTIONS *": (request_bytes(b"", "*", method="OPTIONS"), 404),
    "CONNECT": (b"CONNECT mesh:80 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "a multipart body": (request_bytes(SOUND, "/v1/chat/completions", "Content-Type: multipart/form-data"), 415),
    "a form": (request_bytes(SOUND, "/v1/chat/completions", "Content-Type: application/x-www-form-urlencoded"), 415),
    "a type that is none": (request_bytes(SOUND, "/v1/chat/completions", "Content-Type: ;;;"), 415),
    "another charset": (request_bytes(SOUND, "/v1/chat/completions", "Content-Type: application/json; charset=x"), 415),
    "an unknown encoding": (request_bytes(SOUND, "/v1/chat/completions", "Content-Encoding: quux"), 415),
    "an encoding that is not UTF-8": (request_bytes(SOUND, "/v1/chat/completions", "Content-Encoding: \xff"), 415),
    "two encodings": (request_bytes(SOUND, "/v1/chat/completions", "Content-Encoding: gzip, gzip"), 415),
    "gzip that is none": (request_bytes(SOUND, "/v1/chat/completions", "Content-Encoding: gzip"), 400),
    "deflate that is none": (request_bytes(SOUND, "/v1/chat/completions", "Content-Encoding: deflate"), 400),
    "gzip cut off": (request_bytes(gzip.compress(SOUND)[:-12], "/v1/completions", "Content-Encoding: gzip"), 400),
    "gzip of too much": (
        request_bytes(gzip.compress(b" " * 50_000_000), "/v1/chat/completions", "Content-Encoding: gzip"),
        413,
    ),
    "a body too large": (request_bytes(b" " * (MAX_BODY_BYTES + 1)), 413),
    "a body said to be too large": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{",
        413,
    ),
    "chunks of too much": (chunked(*[b"100000\r\n" + b" " * 0x100000 + b"\r\n"] * 9, b"0\r\n\r\n"), 413),
    "HTTP/1.0 and an unknown path": (b"GET /nothing HTTP/1.0\r\n\r\n", 404),
    "no body": (request_bytes(b""), 400),
    "no JSON": (request_bytes(b"{"), 400),
    "no prompt": (request_bytes(b'{"model": "small"}', "/v1/completions"), 400),
    "an unknown model in a body": (request_bytes(json.dumps(CHAT | {"model": "huge"}).encode()), 404),
    "a byte order mark": (request_bytes(b"\xef\xbb\xbf" + SOUND), 400),
    "a body that is not UTF-8": (request_bytes(b'{"model":"\xff"}'), 400),
    "a lone surrogate": (request_bytes(b'{"model":"\\ud800"}'), 400),
    "deep nesting": (request_bytes(b'{"model":' + b"[" * 5_000 + b"]" * 5_000 + b"}"), 400),
    "a huge number": (request_bytes(b'{"seed":' + b"1" * 50_000 + b"}"), 400),
    "a list": (request_bytes(b"[]"), 400),
    "a string": (request_bytes(b'"hello"'), 400),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_request_gets_a_4xx_in_openais_shape(mesh: TestMesh, name: str) -> None:
    """In full, before the connection is closed; nothing is answered in plain text, and nothing waits for ever."""
    data, status = BROKEN[name]
    response = present(await exchange(mesh.router.http_address, data))
    assert response.status == status, response
    error = response.error()
    assert len(response.body) < 1_000
    if status in (413, 415):
        assert error["param"] == "body"


@pytest.mark.parametrize("sent", [0, 1, len(SOUND) - 1])
async def test_a_body_that_ends_too_early_is_refused(mesh: TestMesh, sent: int) -> None:
    cut = request_bytes(SOUND).removesuffix(SOUND) + SOUND[:sent]
    response = present(await exchange(mesh.router.http_address, cut, end_after_s=0.2))
    assert response.status == 400
    assert response.error()["param"] == "body"


async def everything(mesh: TestMesh, data: bytes) -> list[bytes]:
    """The status of each response until the server closes the connection."""
    host, _, port = mesh.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        writer.write(data)
        answer = await reader.read(-1)
    writer.close()
    return re.findall(rb"HTTP/1.[01] (\d+) ", answer)


async def test_a_request_behind_a_broken_one_is_not_read(mesh: TestMesh) -> None:
    """Behind a fault nobody can say where the next request begins: the connection ends with the refusal."""
    assert await everything(mesh, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n: y\r\n\r\n" + request_bytes(SOUND)) == [
        b"400"
    ]


async def test_requests_one_behind_the_other_are_answered_in_order(mesh: TestMesh) -> None:
    """A refusal for what the body says leaves the connection open."""
    last = request_bytes(b"", "/v1/models", "Connection: close", method="GET")
    nothing = request_bytes(b"", "/v1/nothing", method="GET")
    assert await everything(mesh, request_bytes(b"{") + nothing + request_bytes(SOUND) + last) == [
        b"400", b"404", b"200", b"200",
    ]  # fmt: skip


def test_no_more_is_decompressed_than_the_limit_and_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much would come out: a body of 16 MB can hold 16 GB."""
    made = list[int]()

    class Watched:
        def __init__(self, bits: int) -> None:
            self._inflater = zlib.decompressobj(bits)

        def decompress(self, data: bytes, most: int) -> bytes:
            result = self._inflater.decompress(data, most)
            made.append(len(result))
            return result

    monkeypatch.setattr(bodies, "zlib", SimpleNamespace(**{**vars(zlib), "decompressobj": Watched}))
    honest = gzip.compress(bytes(5_000_000))
    lying = honest[:-4] + bytes(4)
    bodies.check_declared(lying, "gzip", most_bytes=1000)
    with pytest.raises(web.HTTPRequestEntityTooLarge):
        bodies.check_declared(honest, "gzip", most_bytes=1000)
    assert not made
    for encoding, body in (("gzip", lying), ("deflate", zlib.compress(bytes(5_000_000)))):
        made.clear()
        with pytest.raises(web.HTTPRequestEntityTooLarge):
            bodies.decompressed(body, encoding, most_bytes=1000)
        assert made == [1001]


async def test_a_sound_request_is_served_however_it_is_sent(mesh: TestMesh) -> None:
    """HTTP/1.0, chunks, gzip, deflate, a type with a charset, no type."""
    compressed = request_bytes(gzip.compress(SOUND), "/v1/chat/completions", "Content-Encoding: gzip")
    for data in (
        request_bytes(SOUND),
        request_bytes(SOUND, version="HTTP/1.0"),
        request_bytes(SOUND, "/v1/chat/completions", "Content-Type: application/json; charset=UTF-8"),
        compressed,
        request_bytes(zlib.compress(SOUND), "/v1/chat/completions", "Content-Encoding: deflate"),
        request_bytes(zlib.compress(SOUND)[2:-4], "/v1/chat/completions", "Content-Encoding: deflate"),  # no header
        request_bytes(
            gzip.compress(SOUND[:9]) + gzip.compress(SOUND[9:]), "/v1/chat/completions", "Content-Encoding: gzip"
        ),
        chunked(f"{len(SOUND):x}\r\n".encode() + SOUND + b"\r\n0\r\n\r\n"),
    ):
        response = present(await exchange(mesh.router.http_address, data))
        assert response.status == 200, response


def refused(content: object | bytes) -> InvalidRequest:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(InvalidRequest) as caught:
        schema.checked(schema.ChatRequest, body)
    return caught.value


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (CHAT | {"messages": [{"role": "user", "content": "x", "unknown": 1}] * 8_000}, "messages"),
        (CHAT | {"messages": [{"role": "user", "content": "x", "unknown": 1}] * 4_000}, "messages[0].unknown"),
        (CHAT | {"messages": [{"role": "nobody"}] * 4_000}, "messages[0].role"),
        (CHAT | {"stop": [""] * 1_000_000}, "body"),
        (CHAT | {"stop": [""] * 17}, "stop"),
        (CHAT | {"stop": [1] * 2_000_000}, "body"),
        (CHAT | {"stop": [1] * 1_000_000}, "stop"),
        (CHAT | {"stop": [""] * 16}, "stop[0]"),
        (CHAT | {f"k{i}": 1 for i in range(60)}, "k0"),
        (CHAT | {f"k{i}": 1 for i in range(50_000)}, "body"),
        (CHAT | {"messages": [{f"k{i}": 1 for i in range(50_000)}]}, "messages[0]"),
        (CHAT | {"metadata": {f"k{i}": 1 for i in range(17)}}, "metadata"),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1_025}]}, None),
        (b'{"model":"m","messages":[' + b"{}," * 1_000_000 + b"{}]}", "body"),
        (b'{"model":"m","messages":[' + b"[]," * 1_000_000 + b"[]]}", "body"),
        (b'{"model":"m","messages":[' + b'"",' * 100_000 + b'""]}', "messages"),
        (CHAT | {"x" * 5_000_000: 1}, None),
        (CHAT | {"model": "x" * 257}, "model"),
    ],
)
def test_a_report_is_small_whatever_is_wrong(content: object, field: str | None) -> None:
    """At most sixteen faults are named, in a few KiB, and what is too many is counted before it is looked at."""
    error = refused(content)
    assert len(error.problems) <= 16
    assert len(str(error)) < 4_096
    if field is not None:
        assert field in [problem.field for problem in error.problems]


def test_text_full_of_brackets_is_no_structure() -> None:
    """Only what stands outside of strings counts: source code and JSON may be asked about."""
    text = '[{":\\"' * MAX_NODES + "\\" * 101 + '"' + "," * 1_200_000
    content = CHAT | {"messages": [{"role": "user", "content": text}]}
    assert read_object(json.dumps(content).encode()) == content
    assert schema.checked(schema.ChatRequest, json.dumps(content).encode()).messages[0].content == text


def test_the_last_of_two_equal_keys_counts() -> None:
    body = b'{"model":"a","messages":[{"role":"user","content":"x"}],"model":"b"}'
    assert schema.checked(schema.ChatRequest, body).model == "b"


def parsing_app(bodies: RequestBodies, parse: Any) -> web.Application:
    """Its replies are what `parse` makes of a body."""

    async def handle(request: web.Request) -> web.Response:
        try:
            return web.Response(text=await bodies.parsed(request, parse))
        except PenstockError as error:
            return web.Response(status=429, text=str(error))

    app = web.Application()
    app.router.add_post("/", handle)
    return app


async def test_large_bodies_are_parsed_off_the_event_loop() -> None:
    """Small ones on it: a thread would cost them more than it spares others."""
    bodies = RequestBodies(60.0)
    app = parsing_app(bodies, lambda _: threading.current_thread().name)
    async with served(app) as url, aiohttp.ClientSession() as session:
        for size, name in ((INLINE_BYTES, "MainThread"), (INLINE_BYTES + 1, "json_0"), (MAX_BODY_BYTES, "json_0")):
            async with session.post(url, data=b" " * size) as response:
                assert await response.text() == name
    bodies.close()


async def test_the_bytes_of_all_bodies_together_are_bounded() -> None:
    """What comes beyond is told to try again, and room comes back when bodies are done."""
    bodies = RequestBodies(60.0, max_buffered_bytes=1_000_000)
    holding, entered = threading.Event(), threading.Event()

    def parse(body: bytes) -> str:
        entered.set()
        holding.wait(30)
        return "done"

    async with served(parsing_app(bodies, parse)) as url, aiohttp.ClientSession() as session:
        first = asyncio.create_task(session.post(url, data=b" " * 600_000))
        await asyncio.to_thread(entered.wait, 30)
        async with session.post(url, data=b" " * 600_000) as second:
            assert second.status == 429
            assert "try again" in await second.text()
        holding.set()
        assert (await first).status == 200
        async with session.post(url, data=b" " * 600_000) as third:
            assert third.status == 200
    bodies.close()


def test_half_a_surrogate_pair_is_written_as_an_escape() -> None:
    """The compiled encoder refuses it; no reply fails for it."""
    assert json.loads(json_bytes({"text": "a\ud83d", "score": 0.5})) == {"text": "a\ud83d", "score": 0.5}
    assert json_bytes({"text": "é"}) == '{"text":"é"}'.encode()
