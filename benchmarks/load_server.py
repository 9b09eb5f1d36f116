"""`python -m benchmarks.load_server PORT`: an OpenAI-compatible server without a model, for routers to forward to.

Every reply active gets a token each step of 10 ms, up to its `max_tokens`. Unknown fields are ignored, any GET is answered
with 200. As cheap as Python allows: raw HTTP/1.1 on asyncio protocols, one timer for all replies.
"""

import argparse
import asyncio
import json
import time

STEP_S = 0.01
TEXT = "word "


class Engine:
    """Counts the replies' tokens, step by step."""

    def __init__(self) -> None:
        self._left: dict[Connection, int] = {}

    def start(self, connection: "Connection", tokens: int) -> None:
        self._left[connection] = tokens

    def cancel(self, connection: "Connection") -> None:
        self._left.pop(connection, None)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + STEP_S, loop.time())
            await asyncio.sleep(next_s - loop.time())
            for connection, left in [*self._left.items()]:
                connection.token()
                if left == 1:
                    del self._left[connection]
                    connection.finish()
                else:
                    self._left[connection] = left - 1


class Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._buffer = engine, b""
        self._transport: asyncio.Transport | None = None
        self._tokens, self._stream, self._model = 0, False, ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.cancel(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, complete, rest = self._buffer.partition(b"\r\n\r\n")
        if not complete:
            return
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if len(rest) < length:
            return
        body, self._buffer = rest[:length], rest[length:]
        if not head.startswith(b"POST"):
            self._respond({"status": "ok", "data": []})
            return
        request = json.loads(body)
        self._tokens, self._stream, self._model = 0, bool(request.get("stream")), str(request.get("model"))
        if self._stream:
            head_lines = (b"HTTP/1.1 200 OK", b"Content-Type: text/event-stream", b"Transfer-Encoding: chunked")
            self._write(b"\r\n".join(head_lines) + b"\r\n\r\n")
        self._engine.start(self, int(request.get("max_tokens") or request.get("max_completion_tokens") or 16))

    def token(self) -> None:
        """The reply has one more token."""
        self._tokens += 1
        if self._stream:
            role = {"role": "assistant"} if self._tokens == 1 else {}
            self._event({**self._choice({"delta": {**role, "content": TEXT}}, None), "object": "chat.completion.chunk"})

    def finish(self) -> None:
        """The reply has all its tokens."""
        if self._stream:
            self._event({**self._choice({"delta": {}}, "length"), "object": "chat.completion.chunk"})
            self._chunk(b"data: [DONE]\n\n")
            self._write(b"0\r\n\r\n")
            return
        message = {"role": "assistant", "content": TEXT * self._tokens}
        usage = {"prompt_tokens": 1, "completion_tokens": self._tokens, "total_tokens": 1 + self._tokens}
        self._respond({**self._choice({"message": message}, "length"), "object": "chat.completion", "usage": usage})

    def _choice(self, content: dict[str, object], reason: str | None) -> dict[str, object]:
        choice = {"index": 0, **content, "finish_reason": reason}
        return {"id": "chatcmpl-1", "created": int(time.time()), "model": self._model, "choices": [choice]}

    def _event(self, value: dict[str, object]) -> None:
        self._chunk(b"data: %s\n\n" % json.dumps(value, separators=(",", ":")).encode())

    def _chunk(self, data: bytes) -> None:
        self._write(b"%x\r\n%s\r\n" % (len(data), data))

    def _respond(self, value: dict[str, object]) -> None:
        body = json.dumps(value).encode()
        self._write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def serve(port: int) -> None:
    """Serve until cancelled."""
    engine = Engine()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=1024)
    async with server:
        await engine.run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_server", description=__doc__)
    parser.add_argument("port", type=int, help="on loopback")
    asyncio.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
