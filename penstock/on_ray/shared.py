"""What the actors of a mesh share. It is in Ray's own store, where actors find it after a restart."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

NAMESPACE = "penstock"
"""Of our actors in Ray, and of our keys in its store."""
DETACHED: Mapping[str, Any] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",
    "get_if_exists": True,
    "max_restarts": -1,
}
"""The options of our actors: they outlive who starts them, are found by their names, and start again."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all processes of a mesh have in common. run: of one `up`, unlike those of others.

    mesh_text: of the mesh file. folder: what its relative paths are resolved against; empty: the working directory of
    `runtime_env`. files: content by path, for processes of the role that begins the path. redis_url: empty: of a Redis on
    the head node, at redis_address, whose users have redis_passwords.
    """

    run: str
    mesh_text: str
    folder: str
    environment: Mapping[str, str]
    files: Mapping[str, str]
    start_timeout_s: float
    redis_url: str
    redis_passwords: Mapping[str, str] = field(default_factory=dict)
    redis_address: str = ""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    started: bool = False
    """All processes were ready once: from then on, one that ends does not end the mesh."""
    stopping: bool = False

    def redis_url_of(self, role: str) -> str:
        """The URL of the Redis for the processes of a role."""
        return self.redis_url or f"redis://{role}:{self.redis_passwords[role]}@{self.redis_address}/0"

    def files_of(self, role: str) -> dict[str, str]:
        """What processes of a role need, by path below their folder."""
        return {path.partition("/")[2]: text for path, text in self.files.items() if path.startswith(f"{role}/")}


def controller_name(mesh: str) -> str:
    return f"{mesh}:controller"


def load(mesh: str) -> Shared | None:
    """What was saved last for a mesh; None before that."""
    from ray.experimental.internal_kv import _internal_kv_get

    text = _internal_kv_get(mesh, namespace=NAMESPACE)
    return Shared(**json.loads(text)) if text else None


def save(mesh: str, shared: Shared) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(mesh, json.dumps(asdict(shared)), overwrite=True, namespace=NAMESPACE)


def remove(mesh: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(mesh, namespace=NAMESPACE)
