"""Where to connect, and how: shared by all clients."""

import dataclasses
import json
from collections.abc import Sequence

from penstock.client.types import Options

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 10.0  # of calls that only ask
MOVE_TIMEOUT_S = 120.0  # a move waits for as much KV as there is

# Calls that only ask may be repeated; Generate is repeated by the client itself, which knows how to go on.
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
KEEPALIVE_TIMEOUT_S = 10.0
MIN_KEEPALIVE_S = 10.0  # Penstock's servers close connections that ping more often
DEFAULT_SILENCE_S = 15.0


def channel_options(
    keepalive_s: float = DEFAULT_KEEPALIVE_S, keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S
) -> tuple[tuple[str, int | str], ...]:
    """Return the options of every channel of the SDK.

    - `grpc.keepalive_time_ms`: a ping goes out every `keepalive_s` while calls are under way.
    - `grpc.http2.ping_timeout_ms`, `grpc.keepalive_timeout_ms`: a connection whose ping is not acknowledged within
      `keepalive_timeout_s` is closed, its calls end with UNAVAILABLE. This finds half-open connections, where the other side
      is gone and said nothing. The first one is what gRPC 1.85 goes by (60 s by default); the second is the TCP user time-out
      as well: bytes that are not acknowledged for so long close the connection.
    - `grpc.http2.max_pings_without_data`: 0. By default gRPC stops its pings after two without data of its own, as on a
      stream whose request has been sent: a connection that is lost after that would never be found.
    - `grpc.initial_reconnect_backoff_ms`, `grpc.max_reconnect_backoff_ms`: a router that comes back is found within 2 s.
    - `grpc.min_reconnect_backoff_ms`: one attempt to connect may take 10 s (20 s by default).
    - `grpc.max_receive_message_length`: 16 MiB.
    - `grpc.service_config`: calls that only ask are repeated by gRPC after UNAVAILABLE, up to 4 times in all.
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


def check_limits(silence_s: float, keepalive_s: float) -> None:
    """Check a client's limits on a silent router.

    Raises:
        ValueError: A value is out of its range; the message names it.
    """
    if not 0 < silence_s < float("inf"):
        raise ValueError(f"silence_s: must be finite and over 0, not {silence_s:g}")
    if not MIN_KEEPALIVE_S <= keepalive_s < float("inf"):
        raise ValueError(f"keepalive_s: must be finite and at least {MIN_KEEPALIVE_S:g}, not {keepalive_s:g}")


def targets(target: str | Sequence[str]) -> tuple[str, ...]:
    """Routers to use, in turn: `host:port`, several separated by commas, or a list of them."""
    named = target.split(",") if isinstance(target, str) else target
    found = tuple(name.strip() for name in named if name.strip())
    if not found:
        raise ValueError("target: at least one host:port is needed")
    return found


def merged(options: Options | None, more: dict[str, object]) -> Options:
    """Options with some fields replaced; TypeError for a field that Options has not."""
    if isinstance(stop := more.get("stop"), str):
        more = more | {"stop": (stop,)}
    elif isinstance(stop, Sequence):
        more = more | {"stop": tuple(stop)}
    return dataclasses.replace(options or Options(), **more)  # type: ignore[arg-type]
