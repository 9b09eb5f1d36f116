"""Connections to Redis with short timeouts and one exception."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry as BlockingRetry
from redis.sentinel import Sentinel as BlockingSentinel

from penstock.services.domain.errors import Unavailable
from penstock.services.redis_url import SentinelUrl, names_sentinels
from penstock.services.state import server_version

CONNECT_TIMEOUT_S = 2.0
COMMAND_TIMEOUT_S = 2.0

_Client = TypeVar("_Client", Redis, redis.Redis)


class StateUnavailable(Unavailable):
    """Redis is unreachable or does not respond in time."""

    reason = "STATE_UNAVAILABLE"


def connect(url: str, **options: Any) -> Redis:
    """An asyncio client, which connects at its first command.

    It does not retry: a caller is told at once that Redis is unavailable. Where the URL names Sentinels, each new connection
    is to the Redis that they name at that time.
    """
    options |= {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": COMMAND_TIMEOUT_S,
        "health_check_interval": 10,
        "retry": Retry(NoBackoff(), 0),
    }
    return _client(_AsyncRedis, Sentinel, url, options)


def connect_blocking(url: str) -> redis.Redis:
    """A blocking client, for the thread of the span exporter."""
    options = {"socket_connect_timeout": 1.0, "socket_timeout": 1.0, "retry": BlockingRetry(NoBackoff(), 0)}
    return _client(redis.Redis, BlockingSentinel, url, options)


def _client(kind: type[_Client], sentinels: Any, url: str, options: dict[str, Any]) -> _Client:
    """A client of the Redis that a URL names, or that the Sentinels of a URL name."""
    if not names_sentinels(url):
        return kind.from_url(url, **options)
    named = SentinelUrl.of(url)
    of_sentinels, of_redis = _options(named, options)
    manager = sentinels(named.sentinels, sentinel_kwargs=of_sentinels)
    client: _Client = manager.master_for(named.service, redis_class=kind, **of_redis)
    return client


class _AsyncRedis(Redis):
    """Closes its connections to Sentinels, too, if it has any."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        if isinstance(self.connection_pool, SentinelConnectionPool):
            for sentinel in self.connection_pool.sentinel_manager.sentinels:
                await sentinel.aclose()


def _options(named: SentinelUrl, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of clients of the Sentinels, and of the Redis: `options`, and what the URL says."""
    of_url: dict[str, Any] = {**parse_url(named.redis)}  # type: ignore[no-untyped-call]
    for key in ("host", "connection_class"):
        of_url.pop(key, None)
    login = {key: of_url.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in of_url}
    tls = {"ssl": True, **{key: value for key, value in of_url.items() if key.startswith("ssl_")}} if named.tls else {}
    return {**options, **tls, **login}, {**of_url, **options, **tls}


async def server_problem(url: str) -> str:
    """Why the server of a URL cannot hold the state: it is too old. Empty if it can, or does not tell its version.

    Raises:
        StateUnavailable: It cannot be asked.
    """
    with state_errors():
        async with connect(url, protocol=2) as client:  # with 3, connecting would need HELLO
            try:
                reply = await client.execute_command("HELLO")  # type: ignore[no-untyped-call]
            except ResponseError as error:
                return server_version.problem("redis", "before 6") if "unknown command" in str(error) else ""
    return server_version.problem(*server_version.of_hello(_mapping(reply)))


def _mapping(reply: Any) -> dict[bytes, Any]:
    """A reply to HELLO, which is a list in the second version of the protocol."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))


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
