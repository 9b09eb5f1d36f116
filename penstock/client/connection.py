"""Addresses, time-outs and channel options of all clients."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import grpc
from grpc import aio

from penstock.client.types import Options

Metadata = tuple[tuple[str, str], ...]
LoadBalancing = Literal["pick_first", "round_robin"]
ChannelOptions = tuple[tuple[str, int | str], ...]

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_ADMIN = "127.0.0.1:50052"
DEFAULT_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 10.0  # of calls without effects
MOVE_TIMEOUT_S = 120.0  # a move transfers all KV of a reply

# gRPC may retry calls without effects. The client retries Generate itself, to resume where it stopped.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "penstock.router.v1.MeshService"}, {"service": "penstock.planner.v1.PlannerService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

DEFAULT_KEEPALIVE_S = 60.0
MIN_KEEPALIVE_S = 10.0  # Penstock's servers close connections with more frequent pings
# A connection is not given up before its streams are: those of a router that was suspended continue as soon as it does, while
# a thousand that all move to another router cost seconds.
DEFAULT_SILENCE_S = 15.0


def channel_options(
    keepalive_s: float = DEFAULT_KEEPALIVE_S, keepalive_timeout_s: float = DEFAULT_SILENCE_S
) -> tuple[tuple[str, int | str], ...]:
    """Return the options of every channel of the SDK.

    - `grpc.keepalive_time_ms`: a ping is sent every `keepalive_s` while calls are active.
    - `grpc.http2.ping_timeout_ms`, `grpc.keepalive_timeout_ms`: a connection whose ping is not acknowledged within
      `keepalive_timeout_s` is closed, and its calls end with UNAVAILABLE. This detects half-open connections, whose peer
      disappeared without closing them. gRPC 1.85 uses the first option (60 s by default); the second one is also the TCP user
      timeout: a connection whose bytes are not acknowledged for this long is closed.
    - `grpc.http2.max_pings_without_data`: 0. By default gRPC sends only two pings without data, as on a stream whose
      request has been sent; a connection lost after that would never be detected.
    - `grpc.initial_reconnect_backoff_ms`, `grpc.max_reconnect_backoff_ms`: a router that restarts is reconnected within 2 s.
    - `grpc.min_reconnect_backoff_ms`: one connection attempt may take 10 s (20 s by default).
    - `grpc.max_receive_message_length`: 16 MiB.
    - `grpc.service_config`: gRPC retries calls without effects after UNAVAILABLE, with at most 4 attempts.
    """
    return (
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", round(keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 10_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.max_receive_message_length", 16 * 1024 * 1024),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    )


OPTIONS = channel_options()


def check(silence_s: float, keepalive_s: float, load_balancing: LoadBalancing) -> None:
    """Check the limits for silent routers and connections, and how requests are distributed.

    Raises:
        ValueError: A value is out of range; the message names it.
    """
    if not 0 < silence_s < float("inf"):
        raise ValueError(f"silence_s: must be finite and over 0, not {silence_s:g}")
    if not MIN_KEEPALIVE_S <= keepalive_s < float("inf"):
        raise ValueError(f"keepalive_s: must be finite and at least {MIN_KEEPALIVE_S:g}, not {keepalive_s:g}")
    if load_balancing not in ("pick_first", "round_robin"):
        raise ValueError(f"load_balancing: must be pick_first or round_robin, not '{load_balancing}'")


def targets(target: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses in `target`: `host:port`, several separated by commas, or a list."""
    names = target.split(",") if isinstance(target, str) else target
    addresses = tuple(name.strip() for name in names if name.strip())
    if not addresses:
        raise ValueError("target: at least one host:port is needed")
    return addresses


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS of a client. Files are read when the client is created.

    ca: PEM file of the authorities that the server's certificate must come from; None: those of the system.
    identity: PEM file with a private key and its certificate, which administrators need; None: none.
    server_name: the name that the routers' certificate must have, if it is not the one in `target`.
    """

    ca: Path | None = None
    identity: Path | None = None
    server_name: str | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> "Tls":
        """What there is, and may be read, in a folder that `penstock certs` has written."""
        ca, identity = folder / "ca.pem", folder / "admin.pem"
        return cls(ca if ca.exists() else None, identity if os.access(identity, os.R_OK) else None)

    def credentials(self) -> grpc.ChannelCredentials:
        """The credentials of a channel.

        Raises:
            ValueError: A file cannot be read; the message names the field.

        Example:
            >>> Tls(ca=Path("missing.pem")).credentials()
            Traceback (most recent call last):
            ValueError: tls.ca: missing.pem: No such file or directory
        """
        identity = _read(self.identity, "identity")
        return grpc.ssl_channel_credentials(_read(self.ca, "ca"), identity, identity)


def administrative(tls: Tls | None, role: str) -> Tls | None:
    """The same for the administrative listener of a role, which has a name of the mesh's own authority."""
    return replace(tls, server_name=f"{role}.penstock") if tls is not None else None


def secure_options(tls: Tls | None, options: ChannelOptions) -> tuple[grpc.ChannelCredentials | None, ChannelOptions]:
    """The credentials of a channel, None without TLS, and its options."""
    if tls is None:
        return None, options
    name = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return tls.credentials(), (*options, *name)


def channel(target: str, tls: Tls | None, options: ChannelOptions, interceptors: Sequence[Any] = ()) -> grpc.Channel:
    """A channel of the blocking API."""
    credentials, options = secure_options(tls, options)
    if credentials is None:
        created = grpc.insecure_channel(target, options=options)
    else:
        created = grpc.secure_channel(target, credentials, options=options)
    return grpc.intercept_channel(created, *interceptors)


def aio_channel(
    target: str, tls: Tls | None, options: ChannelOptions, interceptors: Sequence[aio.ClientInterceptor] = ()
) -> aio.Channel:
    """A channel of the asyncio API."""
    credentials, options = secure_options(tls, options)
    if credentials is None:
        return aio.insecure_channel(target, options=options, interceptors=interceptors)
    return aio.secure_channel(target, credentials, options=options, interceptors=interceptors)


def _read(path: Path | None, field: str) -> bytes | None:
    try:
        return path.read_bytes() if path is not None else None
    except OSError as error:
        raise ValueError(f"tls.{field}: {path}: {error.strerror}") from None


def metadata(api_key: str | None, more: Mapping[str, str] | None) -> Metadata:
    """The metadata of every request."""
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return tuple((key | dict(more or {})).items())


def call_metadata(
    client: Metadata, request: Metadata, context: Callable[[], Mapping[str, str]] | None, options: Mapping[str, str]
) -> Metadata:
    """The metadata of one call: the client's, the request's, that of the caller's context, and its own; the last one wins."""
    return tuple({**dict(client), **dict(request), **(context() if context is not None else {}), **options}.items())


def merged(options: Options | None, changes: dict[str, object]) -> Options:
    """Options with some fields replaced.

    Raises:
        TypeError: Options has no such field.
    """
    if isinstance(stop := changes.get("stop"), Sequence):
        changes = changes | {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    return dataclasses.replace(options or Options(), **changes)  # type: ignore[arg-type]
