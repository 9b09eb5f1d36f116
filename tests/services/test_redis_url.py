"""URLs that name Sentinels: what they say, and a real Sentinel with logins and TLS."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.local import redis_server as local_redis
from penstock.services.access import authority
from penstock.services.processes import free_port
from penstock.services.redis_url import SentinelUrl, redis_address, redis_url_problem
from penstock.services.state import StateUnavailable, connect
from penstock.services.state.connection import connect_blocking, server_problem
from tests.support.services import RedisProcess


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
