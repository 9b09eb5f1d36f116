"""Where to connect, and how: shared by all clients."""

import dataclasses
import json
from collections.abc import Sequence

from penstock.client.types import Options

USUAL_TARGET = "127.0.0.1:50051"
USUAL_TIMEOUT_S = 600.0
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

OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
)


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
