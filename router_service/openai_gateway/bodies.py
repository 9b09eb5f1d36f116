"""Request bodies: their types, limits, and where they are parsed."""

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from aiohttp import web

from penstock.services.domain.errors import Overloaded, invalid
from penstock.types.problems import shortened

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Of one body, after decompression: two million characters of up to four bytes."""
MAX_BUFFERED_BYTES = 256 * 1024 * 1024
"""Of all bodies, as they came, that are being read or parsed; more are refused until some are done. At most one is
decompressed at a time."""
INLINE_BYTES = 64 * 1024
"""Up to this size a body is parsed on the event loop, within about a millisecond; a thread would cost more than it saves."""
RETRY_AFTER_S = 1.0

_MOST_DEFLATED = 1032  # bytes in one
_ENCODINGS = ("", "identity", "gzip", "deflate")
_USUAL_TYPES = ("application/json", "application/json; charset=utf-8")
_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")

_T = TypeVar("_T")


class RequestBodies:
    """Reads bodies within the limits and parses large ones off the event loop."""

    def __init__(self, timeout_s: float, max_buffered_bytes: int = MAX_BUFFERED_BYTES) -> None:
        """timeout_s: for one body to arrive."""
        self._timeout_s = timeout_s
        self._max_buffered_bytes, self._buffered_bytes = max_buffered_bytes, 0
        self._threads = ThreadPoolExecutor(1, "json")  # the parser holds the GIL: a second thread would gain nothing

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """The result of work on JSON that takes long: other requests are served meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def parsed(self, request: web.Request, parse: Callable[[bytes], _T]) -> _T:
        """The body of `request`, read and parsed.

        Raises:
            InvalidRequest: the body cannot be decoded or parsed.
            Overloaded: too many bytes are being read.
            web.HTTPException: 408 (it does not come in time), 413 (too large), 415 (neither JSON, nor UTF-8, nor in an
                encoding that is served).
        """
        _check_type(request)
        encoding = _encoding(request)
        if not encoding and (whole := _whole(request)) is not None:
            return parse(whole)
        own_bytes = 0
        try:
            body = bytearray()
            if (request.content_length or 0) > MAX_BODY_BYTES:
                raise _too_large()
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for chunk in request.content.iter_any():
                        own_bytes += len(chunk)
                        self._buffered_bytes += len(chunk)
                        if own_bytes > MAX_BODY_BYTES:
                            raise _too_large()
                        if self._buffered_bytes > self._max_buffered_bytes:
                            raise Overloaded("too many large requests are being read", RETRY_AFTER_S)
                        body += chunk
            except TimeoutError:
                raise web.HTTPRequestTimeout(text=f"did not arrive within {self._timeout_s:g} s") from None
            except web.RequestPayloadError as error:
                raise invalid("body", f"cannot be decoded: {first_line(error)}") from None
            if encoding:
                compressed = bytes(body)
                check_declared(compressed, encoding)
                return await self.in_thread(lambda: parse(decompressed(compressed, encoding)))
            if own_bytes <= INLINE_BYTES:
                return parse(bytes(body))
            return await self.in_thread(partial(parse, bytes(body)))
        finally:
            self._buffered_bytes -= own_bytes


def decompressed(body: bytes, encoding: str, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """What a body in `gzip` or `deflate` holds. No more than one byte beyond the limit is ever decompressed.

    Raises:
        InvalidRequest: It is in no such format, or ends early.
        web.HTTPRequestEntityTooLarge: It holds more than `most_bytes`.
    """
    result, rest = bytearray(), body
    while rest:
        inflater = zlib.decompressobj(_window_bits(encoding, rest))
        try:
            result += inflater.decompress(rest, most_bytes + 1 - len(result))
        except zlib.error as error:
            raise invalid("body", f"cannot be decoded: {first_line(error)}") from None
        if len(result) > most_bytes:
            raise _too_large()
        if not inflater.eof:
            raise invalid("body", f"cannot be decoded: the {encoding} data ends early")
        rest = inflater.unused_data if encoding == "gzip" else b""  # gzip may have several members
    return bytes(result)


def check_declared(body: bytes, encoding: str, most_bytes: int = MAX_BODY_BYTES) -> None:
    """Refuse what says itself that it is too large, without a thread: clients that send nothing else would keep it busy.

    Raises:
        web.HTTPRequestEntityTooLarge: It says so.
    """
    declared = int.from_bytes(body[-4:], "little") if encoding == "gzip" else 0  # a gzip member ends with its size
    if most_bytes < declared <= _MOST_DEFLATED * len(body):  # more is no size: the data ends early
        raise _too_large()


def _window_bits(encoding: str, data: bytes) -> int:
    """Zlib's `wbits`. Some clients send deflate without its header, which begins with the method, 8."""
    if encoding == "gzip":
        return 16 + zlib.MAX_WBITS
    return zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS


def _whole(request: web.Request) -> bytes | None:
    """The body, if it arrived with the head and can be parsed at once, as most can."""
    content = request.content
    if content.is_eof() and content.total_bytes <= INLINE_BYTES and content.exception() is None:
        return content.read_nowait()
    return None


def first_line(error: BaseException) -> str:
    """The first line of a library's message about a fault."""
    message = str(getattr(error, "message", "") or error)
    lines = [line.strip(" :") for line in message.splitlines() if line.strip(" :")]
    return shortened(lines[0] if lines else type(error).__name__, 200)


def _check_type(request: web.Request) -> None:
    """Refuse content that is not JSON in UTF-8. Content without a type is accepted: some clients send none."""
    if "Content-Encoding" not in request.headers and request.headers.get("Content-Type") in _USUAL_TYPES:
        return
    kind = request.headers.get("Content-Type", "application/octet-stream").partition(";")[0].strip().lower()
    if kind not in ("application/json", "application/octet-stream"):
        raise web.HTTPUnsupportedMediaType(text=f"must be application/json, not '{shortened(kind)}'")
    charset = request.charset or "utf-8"
    if charset.lower() not in _CHARSETS:
        raise web.HTTPUnsupportedMediaType(text=f"must be in UTF-8, not '{shortened(charset)}'")


def _encoding(request: web.Request) -> str:
    """How the body is compressed; empty if it is not."""
    encoding = ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()
    if encoding not in _ENCODINGS:
        raise web.HTTPUnsupportedMediaType(text=f"may be encoded with gzip or deflate, not '{shortened(encoding)}'")
    return "" if encoding == "identity" else encoding


def _too_large() -> web.HTTPRequestEntityTooLarge:
    return web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, text=f"must have at most {MAX_BODY_BYTES} bytes")
