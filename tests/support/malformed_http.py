"""Malformed HTTP requests, drawn from a seeded generator: the same seed draws the same requests."""

import copy
import gzip
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.types.structured import StructureKind
from tests.support.malformed_forms import hostile_form
from tests.support.raw_http import request_bytes

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {
    "model": "cascade",
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 1,
    "stop": ["x"],
    "max_tokens": 4,
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 1,
    "stream": False,
}
TEXT: dict[str, Any] = {
    "model": "small",
    "prompt": "hello",
    "temperature": 0.5,
    "max_tokens": 4,
    "stop": "x",
    "logprobs": 1,
}
JUNK: list[Any] = [
    None, "", "x" * 300, "\ud800", "\x00", "\U0001f600" * 100, -1, 0, 1.5, 2**63, -(2**70), 10**400, 1e-300, -1e-300, -0.0,
    1e308, math.inf, -math.inf, math.nan, True, [], [[]], [None], {}, {"a": 1}, [{"role": 5}], "null", ["a", 1], [[1, -1]],
    [2**40], ["x"] * 100, {str(i): i for i in range(100)}, [[[[[[[[[[]]]]]]]]]], "x" * 5_000,
]  # fmt: skip
DEEP_TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
_inner = DEEP_TOOL["function"]["parameters"]
for _ in range(80):
    _inner["items"] = {}
    _inner = _inner["items"]
# What no value of a field may be, whatever the other fields are: the refusal has to name that field.
WRONG: dict[str, tuple[Any, ...]] = {
    "model": (None, 5, "", [], "x" * 257, True),
    "messages": (None, 5, [], {}, "hello"),
    "temperature": (-1, 2.1, "1", math.nan, math.inf, -1e-300, [], 10**400, True),
    "top_p": (0, -1, 1.1, "1", math.nan, {}),
    "n": (0, 17, 1.5, "1", -(2**70)),
    "stop": (5, {}, ["x"] * 17, [""], "", ["x" * 257], [None]),
    "max_tokens": (0, -1, 1.5, "4", 2**40),
    "seed": (1.5, "1", 2**63, -(2**63) - 1),
    "top_logprobs": (-1, 21, "1"),
    "stream": (1, "yes", []),
    "logit_bias": ({"x": 1}, {"-1": 1}, {"1": 101}, {"1": None}, {"9" * 5_000: 1}, 5),
    "stop_token_ids": ([-1], ["1"], [2**31], [1] * 65, 5),
    "min_p": (-0.1, 1.1, math.nan, "0"),
    "repetition_penalty": (0, -1, 2.1, math.inf, "1"),
    "chat_template_kwargs": ({"chat_template": "x"}, {"tokenize": True}, {"enable_thinking": "no"}, 5),
    "reasoning_effort": ("x" * 33, "a b", 5),
    "tools": ([{}], 1, [{"type": "function", "function": {"name": "a b"}}], [DEEP_TOOL]),
    "tool_choice": ("sometimes", 5, "required", {"type": "function", "function": {"name": "nobody"}}),
    "guided_json": (5, "x", "[", {"title": "x" * 70_000}),
    "guided_choice": ([], 5, [""], ["x"] * 2_000),
    "structured_outputs": (5, {"json": 5}, {"yaml": "x"}),
    "regex": (5, "", "x" * 9_000),
    "ebnf": (5, "", "r ::= r\n" * 300),
    "presence_penalty": (2.5, "0", math.nan),
    "frequency_penalty": (-2.5, "0"),
    "response_format": (5, "text"),
    "metadata": (5, {str(i): "x" for i in range(17)}),
}


@dataclass(frozen=True)
class HttpCase:
    """data: what goes over the socket. field: what the refusal has to name, where that is certain.

    complete: the request ends by itself; otherwise the client may have to close its side before the server can answer.
    """

    kind: str
    data: bytes
    field: str | None = None
    complete: bool = True

    @property
    def method(self) -> str:
        return self.data.split(b" ", 1)[0].decode("latin-1")


def http_cases(seed: int, count: int) -> Iterator[HttpCase]:
    rng = random.Random(seed)
    kinds = list(_KINDS)
    for _ in range(count):
        kind = rng.choices(kinds, [_KINDS[k] for k in kinds])[0]
        yield kind(rng)


def mutated_object(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A sound request with one to three changes: a value of another kind, a lost field, an unknown one."""
    path, sound = rng.choice(((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)))
    body = copy.deepcopy(sound)
    for _ in range(rng.randint(1, 3)):
        spots = places(body)
        if not spots:
            break
        *way, last = rng.choice(spots)
        inner: Any = body
        for key in way:
            inner = inner[key]
        kind = rng.random()
        if kind < 0.75:
            inner[last] = copy.deepcopy(rng.choice(JUNK))
        elif kind < 0.85:
            del inner[last]
        elif isinstance(inner, dict):
            inner[rng.choice(("tools", "functions", "top_k", "é", "__proto__", "k" * 3_000))] = rng.choice(JUNK[1:6])
    return path, body


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """`data` with some bytes changed, lost, inserted or doubled, and maybe cut off."""
    cut = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(cut) + 1)
        kind = rng.random()
        if kind < 0.5 and at < len(cut):
            cut[at] = rng.randrange(256)
        elif kind < 0.7:
            del cut[at : at + rng.randint(1, 8)]
        elif kind < 0.9:
            cut[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            cut[at:at] = cut[at : at + rng.randint(1, 32)]
    return bytes(cut[: rng.randint(0, len(cut))]) if rng.random() < 0.2 else bytes(cut)


def _mutated_json(rng: random.Random) -> HttpCase:
    path, body = mutated_object(rng)
    return HttpCase("mutated JSON", request_bytes(json.dumps(body).encode(), path))


def _wrong_field(rng: random.Random) -> HttpCase:
    field = rng.choice(list(WRONG))
    path = TEXT_PATH if field in ("model", "temperature", "top_p", "stop") and rng.random() < 0.3 else CHAT_PATH
    body = (TEXT if path == TEXT_PATH else CHAT) | {field: rng.choice(WRONG[field])}
    return HttpCase("wrong field", request_bytes(json.dumps(body).encode(), path), field)


def _form(rng: random.Random) -> HttpCase:
    form = hostile_form(rng)
    field = {StructureKind.JSON_SCHEMA: "guided_json", StructureKind.REGEX: "regex"}.get(form.kind, "ebnf")
    body = CHAT | {"model": "small", "max_tokens": 40, field: form.text}
    return HttpCase("form", request_bytes(json.dumps(body).encode()))


def _broken_json(rng: random.Random) -> HttpCase:
    path, body = rng.choice(((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)))
    data = changed_bytes(rng, json.dumps(body).encode())
    wrapped = rng.choice((data, b"\xef\xbb\xbf" + data, b"[" * 3_000 + data, data.decode("latin-1").encode("utf-16")))
    return HttpCase("broken JSON", request_bytes(wrapped, path))


def _headers(rng: random.Random) -> HttpCase:
    header = rng.choice(
        (
            "Content-Type: multipart/form-data; boundary=x", "Content-Type: text/plain", "Content-Type: ", "Content-Type: ;",
            "Content-Type: application/json; charset=utf-16", "Content-Encoding: gzip", "Content-Encoding: deflate",
            "Content-Encoding: br", "Content-Encoding: zstd", "Content-Encoding: \xff", "Content-Encoding: gzip, gzip",
            "Expect: coffee", "Expect: 100-continue", "Transfer-Encoding: gzip", "Transfer-Encoding: chunked, gzip",
            "Content-Length: 7", "Content-Length: +7", "Upgrade: websocket", "Upgrade: h2c", "Connection: upgrade",
            "traceparent: 00-zz", "traceparent: 00-" + "f" * 32 + "-" + "0" * 16 + "-01", "tracestate: " + "=,;" * 200,
            "baggage: " + "a=b,;=" * 100, "Cookie: " + "x=y;" * 2_000, "Host: again", "X: " + "y" * 20_000, "X y: z", ": z",
            "X: \x00", "X: \x0b", "Accept: text/html", "Range: bytes=-1", "Sec-WebSocket-Key1: x",
        )
    )  # fmt: skip
    body = json.dumps(CHAT).encode()
    if rng.random() < 0.2:
        body = changed_bytes(rng, gzip.compress(body))
    many = [f"X-{i}: y" for i in range(rng.choice((0, 0, 10, 500)))]
    return HttpCase("headers", request_bytes(body, CHAT_PATH, header, *many), complete=False)


def _target(rng: random.Random) -> HttpCase:
    path = rng.choice(
        (
            "/", "*", "", "//", "/v1", "/v1/", "/v1/models/", "/v1/models/nobody", "/v1/models/%00", "/v1/models/%ff%fe",
            "/v1/models/../../etc", "/v1/models/" + "m" * 6_000, "/" + "x" * 20_000, "/v1/chat/completions/", "/v1/models?x",
            "/v1/models#x", "http://other/v1/models", "http://[::1/", "/v1/\xff", "/%", "mesh:80", "/v1/chat/completions?a=b",
        )
    )  # fmt: skip
    method = rng.choice(
        ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "PROPFIND", "BREW", "get", "")
    )
    version = rng.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9", "http/1.1", ""))
    return HttpCase("target", request_bytes(b"", path, method=method, version=version), complete=False)


def _chunks(rng: random.Random) -> HttpCase:
    body = json.dumps(CHAT).encode()
    parts = []
    while body:
        size = rng.randint(1, 60)
        chunk, body = body[:size], body[size:]
        length = rng.choice(
            (b"%x" % len(chunk),) * 12 + (b"-1", b"", b"0x5", b"g", b"f" * 20, b"%x" % (len(chunk) + 1))
        )
        parts.append(
            length
            + rng.choice((b"", b"", b"", b";a=b", b" "))
            + rng.choice((b"\r\n",) * 8 + (b"\n",))
            + chunk
            + b"\r\n"
        )
    parts.append(
        rng.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"", b"0\r\n", b"00\r\nA\r\n\r\n"))
    )
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return HttpCase("chunks", head + b"".join(parts), complete=False)


def _changed_request(rng: random.Random) -> HttpCase:
    data = request_bytes(json.dumps(CHAT).encode(), CHAT_PATH, "Content-Type: application/json", "Accept: */*")
    head, end, body = data.partition(b"\r\n\r\n")
    return HttpCase("changed bytes", changed_bytes(rng, head + end) + body, complete=False)


def _cut_off(rng: random.Random) -> HttpCase:
    data = request_bytes(json.dumps(CHAT).encode(), CHAT_PATH)
    return HttpCase("cut off", data[: rng.randrange(1, len(data))], complete=False)


def _noise(rng: random.Random) -> HttpCase:
    noise = rng.choice(
        (rng.randbytes(rng.randint(1, 3_000)), b"\r\n" * rng.randint(1, 2_000), b"\x16\x03\x01" + rng.randbytes(200))
    )
    return HttpCase("noise", noise, complete=False)


def _large(rng: random.Random) -> HttpCase:
    message = {"role": "user", "content": "x", "unknown": 1}
    contents: tuple[Callable[[], bytes], ...] = (
        lambda: json.dumps(CHAT | {"messages": [message] * 8_000}).encode(),
        lambda: json.dumps(CHAT | {"stop": [""] * 500_000}).encode(),
        lambda: json.dumps(CHAT | {f"k{i}": i for i in range(50_000)}).encode(),
        lambda: json.dumps(TEXT | {"prompt": [2**40] * 200_000}).encode(),
        lambda: json.dumps(TEXT | {"prompt": "x" * 2_000_001}).encode(),
        lambda: b'{"model":"small","prompt":[' + b"[]," * 300_000 + b"[]]}",
        lambda: b'{"seed":' + b"9" * 1_000_000 + b"}",
        lambda: b'{"model":"' + b"\\u00e9" * 300_000 + b'"}',
        lambda: b" " * (8 * 1024 * 1024 + 1),
    )
    return HttpCase("large", request_bytes(rng.choice(contents)(), rng.choice((CHAT_PATH, TEXT_PATH))))


_KINDS: dict[Callable[[random.Random], HttpCase], float] = {
    _mutated_json: 25,
    _wrong_field: 20,
    _broken_json: 12,
    _form: 2,
    _headers: 12,
    _target: 8,
    _chunks: 8,
    _changed_request: 8,
    _cut_off: 2,
    _noise: 4,
    _large: 1,
}
