"""`python -m benchmarks.load_client URL ...`: generate load for an OpenAI-compatible server from a separate process.

Uses little CPU: raw HTTP/1.1 on asyncio protocols. Each connection sends requests in sequence and parses only the necessary
parts of replies (the first piece of text, the end). Prints one JSON object: replies, failed, seconds,
first_token_ms, reply_ms (p50, p95, p99).
"""

import argparse
import asyncio
import json
import ssl
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

END = b"\r\n0\r\n\r\n"  # of a chunked body
CONTENT = b'"content":"'
EMPTY_CONTENT = b'"content":""'


class Load:
    """Shared state of all connections. replies, requests: number still to be answered and to be sent."""

    def __init__(self, request: bytes, replies: int, *, stream: bool) -> None:
        self.request, self.stream = request, stream
        self.unsent = self.unanswered = replies
        self.failed = 0
        self.first_s: list[float] = []
        self.reply_s: list[float] = []
        self.done = asyncio.get_running_loop().create_future()

    def answered(self) -> None:
        self.unanswered -= 1
        if self.unanswered == 0 and not self.done.done():
            self.done.set_result(None)


class Connection(asyncio.Protocol):
    """Sends requests in sequence over one connection until none are left."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._began = 0.0
        self._buffer = b""
        self._first = False
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._load.stream:
            self._streamed(data)
        else:
            self._whole(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy:
            self._end(ok=False)

    def _send(self) -> None:
        assert self._transport is not None
        self._buffer, self._first, self._busy = b"", False, False
        if self._load.unsent == 0:
            self._transport.close()
            return
        self._load.unsent -= 1
        self._busy, self._began = True, time.perf_counter()
        self._transport.write(self._load.request)

    def _streamed(self, data: bytes) -> None:
        if not self._first:
            self._buffer += data
            if not self._buffer.startswith(b"HTTP/1.1 200") and len(self._buffer) >= 12:
                self._end(ok=False)
                return
            if self._buffer.count(CONTENT) > self._buffer.count(EMPTY_CONTENT):
                self._first, self._buffer = True, b""
                self._load.first_s.append(time.perf_counter() - self._began)
        tail = self._buffer[-len(END) :] + data if self._first else self._buffer
        if END in tail:
            self._end(ok=True)
        elif self._first:
            self._buffer = tail[-len(END) :]

    def _whole(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b"")
        complete = len(body) >= int(length.partition(b":")[2]) if length else body.endswith(END)
        if complete:
            self._end(ok=head.startswith(b"HTTP/1.1 200"))

    def _end(self, *, ok: bool) -> None:
        if not self._busy:
            return
        self._busy = False
        self._load.failed += not ok
        self._load.reply_s.append(time.perf_counter() - self._began)
        self._load.answered()
        if self._transport is not None and not self._transport.is_closing():
            self._send()


def request(url: str, model: str, tokens: int, *, stream: bool, key: str = "none") -> bytes:
    """The bytes of one chat request. key: the API key."""
    parts = urlsplit(url)
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "stream": stream, "temperature": 0}
    payload = json.dumps({**body, "max_tokens": tokens}).encode()
    head = (
        f"POST {parts.path.rstrip('/')}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def spread_ms(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds; empty for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {
        name: round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) for name, share in at.items()
    }


async def run(
    url: str,
    model: str,
    tokens: int,
    connections: int,
    replies: int,
    *,
    stream: bool,
    key: str = "none",
    ca: str | None = None,
) -> dict[str, object]:
    """Run the load to its end. ca: file of the authorities that an https URL's certificate must come from."""
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    load = Load(request(url, model, tokens, stream=stream, key=key), replies, stream=stream)
    context = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
    began = time.perf_counter()
    for _ in range(min(connections, replies)):
        await loop.create_connection(
            lambda: Connection(load), parts.hostname or "127.0.0.1", parts.port or 80, ssl=context
        )
    await load.done
    return {
        "replies": replies,
        "failed": load.failed,
        "seconds": time.perf_counter() - began,
        "first_token_ms": spread_ms(load.first_s),
        "reply_ms": spread_ms(load.reply_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_client", description=__doc__)
    parser.add_argument("url", help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="only")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--replies", type=int, default=1000)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--key", default="none", help="API key")
    parser.add_argument("--ca", help="PEM file of the authorities for https")
    args = parser.parse_args()
    arguments = (args.url, args.model, args.tokens, args.connections, args.replies)
    figures = asyncio.run(run(*arguments, stream=args.stream, key=args.key, ca=args.ca))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
