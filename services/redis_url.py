"""The URL of the Redis: which forms it may have, how it names Sentinels, and what may be shown of it. No I/O."""

from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from penstock.services.mesh_schema.common import MAX_PORT

SENTINEL = "+sentinel"
SENTINEL_PORT = 26379
SECRET_OPTIONS = ("username", "password", "sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """`redis+sentinel://[USER:PASSWORD@]HOST[:PORT],.../SERVICE[/NUMBER][?OPTIONS]`, or with `rediss`.

    sentinels: (host, port) of each. service: the name by which they know the Redis. redis: a URL with the same
    login, number and options, in which `redis` is in place of the host that the Sentinels will name.
    """

    sentinels: tuple[tuple[str, int], ...]
    service: str
    redis: str

    @classmethod
    def of(cls, url: str) -> Self:
        """Read a URL.

        Raises:
            ValueError: What it lacks, or what of it is bad.
        """
        parts = urlsplit(url)
        login, at, hosts = parts.netloc.rpartition("@")
        service, _, number = parts.path.removeprefix("/").partition("/")
        if not service:
            raise ValueError("names no service: must be redis+sentinel://HOST:PORT,HOST:PORT/SERVICE")
        if number and not number.isdecimal():
            raise ValueError(f"the number of the database must be a number, not '{number}'")
        redis = urlunsplit((parts.scheme.removesuffix(SENTINEL), f"{login}{at}redis", f"/{number}", parts.query, ""))
        return cls(tuple(_host_and_port(host) for host in hosts.split(",")), unquote(service), redis)

    @property
    def tls(self) -> bool:
        return self.redis.startswith("rediss:")


def names_sentinels(url: str) -> bool:
    """Whether a URL names Sentinels, which know where the Redis is."""
    return url.partition("://")[0] in (f"redis{SENTINEL}", f"rediss{SENTINEL}")


def redis_url_problem(url: str) -> str:
    """The problem with the URL of a Redis; empty for a valid URL and for an empty one."""
    if not url:
        return ""
    try:
        parts = urlsplit(url)
        if not parts.scheme.startswith("rediss") and any(key.startswith("ssl_") for key, _ in parse_qsl(parts.query)):
            return "ssl_ options are for rediss"
        if names_sentinels(url):
            SentinelUrl.of(url)
            return ""
        if parts.scheme not in ("redis", "rediss", "unix"):
            return (
                "must be redis://HOST:PORT/NUMBER, rediss://, unix:// or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE"
            )
        if parts.scheme != "unix":
            _host_and_port(parts.netloc.rpartition("@")[2])
    except ValueError as error:
        return str(error)
    return ""


def redis_address(url: str) -> str:
    """Where a valid URL says that the Redis is, for messages."""
    if names_sentinels(url):
        named = SentinelUrl.of(url)
        return f"{', '.join(f'{host}:{port}' for host, port in named.sentinels)} (Sentinels of {named.service})"
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"


def without_password(url: str) -> str:
    """The URL of a Redis without user names and passwords, for files, logs and messages."""
    parts = urlsplit(url)
    query = [(key, value) for key, value in parse_qsl(parts.query) if key not in SECRET_OPTIONS]
    host = parts.netloc.rpartition("@")[2]
    rest = urlunsplit(("", "", parts.path, urlencode(query), ""))
    return f"{parts.scheme}://{host}{rest}" if parts.scheme else url


def _host_and_port(text: str) -> tuple[str, int]:
    """The host and the port of `HOST[:PORT]`, of a Sentinel if it has none.

    Raises:
        ValueError: There is no host, or the port is bad.
    """
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"the port must be a number up to {MAX_PORT}") from None
    if not parts.hostname:
        raise ValueError("names no host")
    return parts.hostname, SENTINEL_PORT if port is None else port
