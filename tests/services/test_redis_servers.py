"""Which Redis a mesh accepts, by its URL and by what it says of itself: real ones, a Sentinel, one that is too old."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.local import redis_server as local_redis
from penstock.local.redis_server import NoRedis
from penstock.services.access import authority
from penstock.services.domain.instances import Role
from penstock.services.processes import free_port
from penstock.services.redis_url import SentinelUrl, redis_address, redis_url_problem
from penstock.services.runtime import ServiceFailed
from penstock.services.state import server_version
from penstock.services.state.connection import StateUnavailable, connect, connect_blocking, server_problem
from tests.conftest import MeshFileMaker
from tests.support.mesh import COMPOSE
from tests.support.services import RedisProcess, serving

TOO_OLD = "Redis before 6 is too old: Redis 6.2 or later is needed, or Valkey"


@pytest.mark.parametrize(
    ("server", "version", "problem"),
    [
        (b"redis", b"6.0.16", TOO_OLD.replace("before 6", "6.0.16")),
        (b"redis", b"6.2.0", ""),
        (b"redis", b"10.1.0", ""),
        (b"redis", b"255.255.255", ""),
        (b"valkey", b"9.1.2", ""),
        (b"redis", b"", ""),
        (b"", b"", ""),
    ],
)
def test_redis_6_2_or_later_and_valkey_will_do(server: bytes, version: bytes, problem: str) -> None:
    """A server that does not tell its version may be one."""
    assert server_version.problem(*server_version.of_hello({b"server": server, b"version": version})) == problem


def test_a_reply_to_hello_without_texts_tells_nothing() -> None:
    assert server_version.problem(*server_version.of_hello({b"server": b"redis", b"version": b"6.0.9"}))
    assert not server_version.problem(*server_version.of_hello({b"server": b"redis", b"version": 6}))
    assert not server_version.problem(*server_version.of_hello({}))


async def test_a_real_server_is_asked(redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await server_problem(redis.url) == ""
    monkeypatch.setattr(server_version, "NEEDED", (99, 0))
    if "redis-server" in local_redis.find():
        assert "Redis 99.0 or later is needed" in await server_problem(redis.url)
        with pytest.raises(NoRedis, match=r"Redis 99\.0 or later is needed"):
            local_redis.version(local_redis.find())
    with pytest.raises(StateUnavailable):
        await server_problem(f"redis://127.0.0.1:{free_port()}/0")


@pytest.fixture
async def old_redis() -> AsyncIterator[str]:
    """The URL of a server that answers as Redis 5 does: it has no HELLO."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                length = int((await reader.readline())[1:])
                words.append((await reader.readexactly(length + 2))[:length])
            match words[0].upper():
                case b"PING":
                    writer.write(b"+PONG\r\n")
                case _:
                    writer.write(b"-ERR unknown command `%s`, with args beginning with: \r\n" % words[0])
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_service_on_a_redis_that_is_too_old_ends_and_says_why(old_redis: str, mesh_file: MeshFileMaker) -> None:
    assert await local_redis.unreachable(old_redis) == TOO_OLD
    with pytest.raises(ServiceFailed, match=r"redis_url: Redis before 6 is too old"):
        async with serving(Role.PLANNER, COMPOSE[Role.PLANNER], mesh_file(), old_redis) as planner:
            await planner.fatal


def test_a_binary_that_is_too_old_is_not_started(tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\necho Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64\n")
    binary.chmod(0o755)
    with pytest.raises(NoRedis, match=r"redis-server: Redis 6\.0\.16 is too old"):
        local_redis.write_users(tmp_path / "data", "mesh", str(binary))


def test_a_url_names_sentinels_a_service_and_how_the_redis_is_reached() -> None:
    named = SentinelUrl.of("rediss+sentinel://user:a%2Cb@one:1,[::2]/state/3?ssl_ca_certs=ca.pem")
    assert named.sentinels == (("one", 1), ("::2", 26379))
    assert (named.service, named.tls) == ("state", True)
    assert named.redis == "rediss://user:a%2Cb@redis/3?ssl_ca_certs=ca.pem"
    assert redis_address("redis+sentinel://one:1,two/state") == "one:1, two:26379 (Sentinels of state)"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis://[::1", "Invalid IPv6 URL"),
        ("redis+sentinel://[::1/state", "Invalid IPv6 URL"),
        ("redis+sentinel://h:0x/state", "the port must be a number"),
        ("redis://h?ssl_ca_certs=ca.pem", "ssl_ options are for rediss"),
        ("redis+sentinel://h/state?ssl_ca_certs=ca.pem", "ssl_ options are for rediss"),
    ],
)
def test_what_is_no_address_is_refused(url: str, problem: str) -> None:
    assert problem in redis_url_problem(url)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """The part of a URL after the login: of a Sentinel of a Redis. Both ask for passwords, and speak TLS."""
    certificates, ports = tmp_path / "certs", [free_port() for _ in range(2)]
    authority.create(certificates, ["127.0.0.1"], days=1)
    ca, identity = certificates / "ca.pem", certificates / "router.pem"
    tls = {"cert-file": identity, "key-file": identity, "ca-cert-file": ca, "auth-clients": "no", "replication": "yes"}
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor state 127.0.0.1 {ports[0]} 1\nsentinel auth-pass state of-redis\n")
    with ExitStack() as stack:
        for port, password, sentinel in zip(ports, ("of-redis", "of-sentinel"), (None, config), strict=True):
            options = {f"tls-{name}": str(value) for name, value in tls.items()}
            options |= {"tls-port": str(port), "requirepass": password}
            plain_port = free_port()
            argv = tuple(part for name, value in options.items() for part in (f"--{name}", value))
            process = RedisProcess(local_redis.find(), plain_port, tmp_path, argv, sentinel)
            process.url = f"redis://:{password}@127.0.0.1:{plain_port}"
            stack.callback(process.stop)
            process.start()
        yield f"127.0.0.1:{ports[1]}/state?ssl_ca_certs={ca}&sentinel_password"


async def test_sentinels_and_their_redis_have_logins_and_certificates(guarded: str) -> None:
    url = f"rediss+sentinel://:of-redis@{guarded}=of-sentinel"
    assert await server_problem(url) == ""
    async with connect(url) as client:
        assert await client.set("a", "1")
    with connect_blocking(url) as blocking:
        assert blocking.get("a") == b"1"
    wrong = [url.replace("of-redis", "x"), url.replace("of-sentinel", "x"), url.replace("/state", "/other")]
    for each in wrong:
        with pytest.raises(StateUnavailable):
            await server_problem(each)
