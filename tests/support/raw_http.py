"""HTTP as bytes on a socket: for requests that no client library would send."""

import asyncio
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RawResponse:
    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape; AssertionError if it has another."""
        assert self.headers["content-type"].startswith("application/json"), self
        error = json.loads(self.body)["error"]
        assert isinstance(error, dict), self
        assert set(error) == {"message", "type", "param", "code"}, self
        assert error["message"], self
        assert error["type"], self
        return error


class ConnectionReset(AssertionError):
    """The server reset or closed the connection before its answer was complete."""


async def exchange(
    address: str, data: bytes, *, method: str = "POST", end_after_s: float | None = None, timeout_s: float = 30.0
) -> RawResponse | None:
    """Send bytes and read one response; None where the server closes the connection without one.

    end_after_s: without an answer by then, our side of the connection is closed, as by a client that has no more to say.
    TimeoutError if nothing comes of it within `timeout_s`; ConnectionReset.
    """
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, int(port))
        sending = asyncio.create_task(_send(writer, data))
        head = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        try:
            await asyncio.wait((head,), timeout=end_after_s)
            if not head.done():
                await sending
                writer.write_eof()
            try:
                return await _response(reader, await head, method)
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise ConnectionReset(f"half an answer: {error.partial[:200]!r}") from None
                return None
            except ConnectionError as error:
                raise ConnectionReset(repr(error)) from None
        finally:
            writer.close()
            for task in (sending, head):
                task.cancel()
            await asyncio.gather(sending, head, return_exceptions=True)


async def connect(address: tuple[str, int]) -> socket.socket:
    """A connection whose receive buffer is soon full."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, address)
    return made


async def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    loop, found = asyncio.get_running_loop(), b""
    async with asyncio.timeout(60):
        with suppress(ConnectionResetError):
            while part := await loop.sock_recv(connection, 65536):
                found += part
    return found


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(ConnectionError):  # a refusal may come before everything is sent
        writer.write(data)
        await writer.drain()


async def _response(reader: asyncio.StreamReader, head: bytes, method: str) -> RawResponse:
    status_line, *lines = head.decode("latin-1").split("\r\n")
    version, status, *_ = status_line.split(" ")
    assert version in ("HTTP/1.0", "HTTP/1.1"), head
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    if status == "100":
        return await _response(reader, await reader.readuntil(b"\r\n\r\n"), method)
    if method == "HEAD":
        return RawResponse(int(status), headers, b"")
    if "content-length" in headers:
        return RawResponse(int(status), headers, await reader.readexactly(int(headers["content-length"])))
    if headers.get("transfer-encoding") != "chunked":
        return RawResponse(int(status), headers, await reader.read(-1))
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return RawResponse(int(status), headers, body)


def request_bytes(
    body: bytes, path: str = "/v1/chat/completions", *headers: str, method: str = "POST", version: str = "HTTP/1.1"
) -> bytes:
    """A request as it should be, but for what is said otherwise."""
    lines = [f"{method} {path} {version}", "Host: mesh", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
