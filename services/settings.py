"""What every service reads from the environment. Only this module reads it.

A process with a bad value ends at boot and names the field.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.mesh_view import PULL_INTERVAL_S
from penstock.services.domain.server_nodes import ServerNode
from penstock.services.field_problems import SettingsError, field_problems, joined
from penstock.services.mesh_schema.common import MAX_PORT
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.router import MAX_ROUTER_PROCESSES, processes_problem
from penstock.services.redis_url import redis_url_problem
from penstock.types.problems import FieldProblem

T = TypeVar("T")


class ServiceSettings(BaseSettings):
    """Settings that every service reads from environment variables with the prefix PENSTOCK_."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_", frozen=True, extra="ignore", use_attribute_docstrings=True, env_ignore_empty=True
    )

    mesh_file: Path = Path("mesh.yaml")
    """The mesh file."""
    mesh_folder: str = ""
    """The folder that its relative paths are resolved against. Empty: the mesh file's own."""
    tier: str = ""
    """The tier that a worker serves; required for workers."""
    worker_index: int = Field(default=0, ge=0)
    """Index of a worker in its tier: selects the GPUs and the port of its SGLang server."""
    worker_shape: str = ""
    """Shape of a worker, where it is not the mesh file's: `tp2pp1`, `tp4pp2ep4attndp2-h100`. `penstock up` sets it as the
    plan says."""
    worker_node: str = ""
    """Which part of a server over several nodes a worker runs, RANK/COUNT@HOST:PORT: `1/2@10.0.0.7:20000`. `penstock up --on
    ray` sets it."""
    instance_id: str = ""
    """Unique name of this process in the mesh. Empty: derived from role, tier, host and process id."""
    sglang_endpoint: str = ""
    """URL of this worker's SGLang server, if a tier has several. Empty: the URL in the mesh file."""
    bind_host: str = "127.0.0.1"
    """The address that servers listen on."""
    advertise_host: str = ""
    """The address at which others reach this process. Empty: bind_host, or the host's name if that is 0.0.0.0."""
    grpc_port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Port of the gRPC server; 0: any free port."""
    admin_host: str = "127.0.0.1"
    """The address that the administrative listener listens on: status, traces, moves, plans, draining and reflection."""
    admin_port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Port of the administrative listener; 0: any free port."""
    http_port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Port of the router's OpenAI-compatible API; 0: any free port."""
    open_access: bool = False
    """Whether to listen on other addresses than loopback although callers need neither an API key nor a certificate. For
    networks that only the mesh and its operators can reach."""
    metrics_port: int = Field(default=0, ge=0, le=MAX_PORT)
    """Port of the Prometheus metrics; 0: any free port."""
    router_processes: int | None = Field(default=None, ge=1, le=MAX_ROUTER_PROCESSES)
    """Number of processes of a router. Empty: router.processes of the mesh file."""
    tls_folder: str = ""
    """Folder of this process's certificates. Empty: tls.folder of the mesh file."""
    keys_file: str = ""
    """Key file. Empty: access.keys of the mesh file."""
    redis_url: str = ""
    """URL of the Redis, or of Sentinels: `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE`. Empty: REDIS_URL, then the mesh
    file's."""
    lease_s: float = Field(default=3.0, gt=0)
    """Lease of an instance. When it expires, the instance gets new requests only if no other instance can take them, and is
    removed unless it responds to a probe."""
    publish_interval_s: float = Field(default=0.25, gt=0)
    """Shortest interval between two updates of an instance's load; without changes it is published every third of a lease."""
    pull_interval_s: float = Field(default=PULL_INTERVAL_S, gt=0)
    """Average interval at which a process reads the state of the mesh. Workers read that of their tier every
    `stages.look_s`."""
    drain_s: float = Field(default=30.0, ge=0)
    """Grace period for running requests at shutdown."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe message that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Log format: text is for people, json for log collectors; both contain trace ids."""
    frame_interval_ms: float = Field(default=20.0, ge=0)
    """How long a worker may gather tokens into one frame; the first token is sent at once."""
    frame_tokens: int = Field(default=32, ge=1)
    """Largest number of tokens in one frame."""
    trace_keep: int = Field(default=500, ge=0)
    """Traces kept in Redis for `penstock trace`; 0 keeps none."""

    @field_validator("redis_url")
    @classmethod
    def _usable_redis(cls, url: str) -> str:
        if problem := redis_url_problem(url):
            raise ValueError(problem)
        return url

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    @classmethod
    def load(cls, **values: Any) -> Self:
        """Read the environment; `values` take precedence.

        Raises:
            SettingsError: A value is bad; the message names every bad field.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            problems = [FieldProblem(f"PENSTOCK_{p.field.upper()}", p.problem) for p in field_problems(error, cls)]
            raise SettingsError(joined(problems), problems) from None

    def state_url(self, mesh: MeshFile) -> str:
        """The URL of the Redis.

        Raises:
            SettingsError: Neither the environment nor the mesh file gives one, or REDIS_URL is bad.
        """
        url = os.environ.get("REDIS_URL", "")
        if not self.redis_url and (problem := redis_url_problem(url)):
            raise _bad_variable("REDIS_URL", problem)
        url = self.redis_url or url or mesh.redis_url
        if not url:
            raise SettingsError("redis_url: neither PENSTOCK_REDIS_URL, REDIS_URL nor the mesh file names a Redis")
        return url

    @property
    def reachable_host(self) -> str:
        """The host in the addresses that this process tells others."""
        return self.advertise_host or (socket.gethostname() if self.bind_host == "0.0.0.0" else self.bind_host)

    @property
    def reachable_admin_host(self) -> str:
        """The host in the address of the administrative listener that this process tells others."""
        return (self.advertise_host or socket.gethostname()) if self.admin_host == "0.0.0.0" else self.admin_host

    @property
    def shape(self) -> ReplicaShape | None:
        """The shape of a worker; None: the mesh file's.

        Raises:
            SettingsError: It is none; names PENSTOCK_WORKER_SHAPE.
        """
        return _named(ReplicaShape.named, self.worker_shape, "PENSTOCK_WORKER_SHAPE")

    @property
    def server_node(self) -> ServerNode | None:
        """The part of a server that a worker runs; None: all of it.

        Raises:
            SettingsError: It is none; names PENSTOCK_WORKER_NODE.
        """
        return _named(ServerNode.named, self.worker_node, "PENSTOCK_WORKER_NODE")

    def processes_of_router(self, mesh: MeshFile) -> int:
        """How many processes each router has.

        Raises:
            SettingsError: more than it has places for requests; names PENSTOCK_ROUTER_PROCESSES.
        """
        if self.router_processes is None:
            return mesh.router.processes
        if problem := processes_problem(self.router_processes, mesh.router):
            raise _bad_variable("PENSTOCK_ROUTER_PROCESSES", problem)
        return self.router_processes

    def certificate_folder(self, mesh: MeshFile) -> Path | None:
        """The folder of the mesh's certificates; None without TLS."""
        path = self.tls_folder or mesh.tls.folder
        return self.resolve(path) if path else None

    def key_file(self, mesh: MeshFile) -> Path | None:
        """The key file; None where requests need no key."""
        path = self.keys_file or mesh.access.keys
        return self.resolve(path) if path else None

    def resolve(self, path: str) -> Path:
        """A path from the mesh file, resolved if it is relative."""
        return Path(self.mesh_folder or self.mesh_file.resolve().parent) / path


def _named(parse: Callable[[str], T], name: str, variable: str) -> T | None:
    """What a variable names; None if it is empty."""
    try:
        return parse(name) if name else None
    except ValueError as error:
        raise _bad_variable(variable, str(error)) from None


def _bad_variable(name: str, problem: str) -> SettingsError:
    return SettingsError(f"{name}: {problem}", [FieldProblem(name, problem)])


def environment_value(name: str) -> str | None:
    """The environment variable that a setting names (such as an API key); None if it is not set."""
    return os.environ.get(name)
