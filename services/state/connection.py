"""Connections to Redis with short timeouts and one exception."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry as BlockingRetry

from penstock.services.domain.errors import Unavailable
from penstock.services.state import server_version

CONNECT_TIMEOUT_S = 2.0
COMMAND_TIMEOUT_S = 2.0


class StateUnavailable(Unavailable):
    """Redis is unreachable or does not respond in time."""

    reason = "STATE_UNAVAILABLE"


def connect(url: str, **options: Any) -> Redis:
    """An asyncio client, which connects at its first command.

    It does not retry: a subscription that reconnected by itself would have missed messages.
    """
    return Redis.from_url(
        url,
        **options,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=COMMAND_TIMEOUT_S,
        health_check_interval=10,
        retry=Retry(NoBackoff(), 0),
    )


async def server_problem(url: str) -> str:
    """Why the server of a URL cannot hold the state: it is too old. Empty if it can, or does not tell its version.

    Raises:
        StateUnavailable: It cannot be asked.
    """
    with state_errors():
        async with connect(url, protocol=2) as client:  # with 3, connecting would need HELLO
            client.set_response_callback("INFO", lambda text, **_: text)  # type: ignore[arg-type]
            try:
                reply = await client.execute_command("HELLO")  # type: ignore[no-untyped-call]
                return server_version.problem(*server_version.of_hello(_mapping(reply)))
            except ResponseError:
                pass
            try:
                info = await client.execute_command("INFO", "server")  # type: ignore[no-untyped-call]
            except ResponseError:
                return ""
    return server_version.problem(*server_version.of_info(as_bytes(info).decode(errors="replace")))


def _mapping(reply: Any) -> dict[bytes, Any]:
    """A reply to HELLO, which is a list in the second version of the protocol."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))


def connect_blocking(url: str) -> redis.Redis:
    """A blocking client, for the thread of the span exporter."""
    return redis.Redis.from_url(
        url, socket_connect_timeout=1.0, socket_timeout=1.0, retry=BlockingRetry(NoBackoff(), 0)
    )


def without_password(url: str) -> str:
    """The URL of a Redis without user name and password, for files, logs and messages."""
    parts = urlsplit(url)
    query = [(key, value) for key, value in parse_qsl(parts.query) if key not in ("username", "password")]
    host = parts.netloc.rpartition("@")[2]
    rest = urlunsplit(("", "", parts.path, urlencode(query), ""))
    return f"{parts.scheme}://{host}{rest}" if parts.scheme else url


def as_bytes(value: bytes | str) -> bytes:
    """The value as bytes, as clients without decode_responses return it."""
    return value if isinstance(value, bytes) else value.encode()


@contextmanager
def state_errors() -> Iterator[None]:
    """Turn the driver's errors into StateUnavailable."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise StateUnavailable(f"Redis is unavailable: {error}") from error
