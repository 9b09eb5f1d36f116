"""What `penstock up` is given: the mesh file with the options of the command."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.local import redis_server
from penstock.placement.mesh import MeshFailed
from penstock.placement.start import needs_hub, start_timeout_s
from penstock.question_files.errors import FileError
from penstock.question_files.questions import yaml_fields
from penstock.services.field_problems import SettingsError, joined
from penstock.services.mesh_check import check_mesh_file
from penstock.services.mesh_file import load_mesh_file, read_mesh_data
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.settings import ServiceSettings


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """Options of a mesh.

    folder: for the logs, the data of Redis and the run file. workers: number of workers by tier, instead of the mesh file's.
    any_ports: routers use any free ports instead of the mesh file's. runtime_env: a file with Ray's runtime environment.
    """

    mesh_file: Path
    folder: Path
    workers: dict[str, int] | None = None
    any_ports: bool = False
    log_level: str = "info"
    runtime_env: Path | None = None

    def ray_runtime_env(self) -> dict[str, Any]:
        """The runtime environment; empty without one.

        Raises:
            SettingsError: The file does not hold a mapping.
        """
        try:
            return yaml_fields(self.runtime_env) if self.runtime_env is not None else {}
        except FileError as error:
            raise SettingsError(f"--runtime-env: {error}") from None


@dataclass(frozen=True, slots=True)
class MeshInput:
    """A checked mesh file with the numbers of workers of the options. text: of this file.

    folder: what its relative paths are resolved against. start_timeout_s: for all processes to be ready.
    """

    mesh: MeshFile
    text: str
    folder: Path
    start_timeout_s: float
    settings: ServiceSettings
    environment: dict[str, str]
    """Variables of all processes, in addition to where their mesh file is."""

    @property
    def tls_folder(self) -> Path | None:
        """The folder of the mesh's certificates; None without TLS."""
        folder = self.settings.certificate_folder(self.mesh)
        return folder.resolve() if folder is not None else None

    async def configured_redis(self) -> str:
        """The URL of the Redis that the environment or the mesh file names; empty if a Redis has to be started.

        Raises:
            MeshFailed: It does not respond.
        """
        configured = os.environ.get("REDIS_URL", "") or self.mesh.redis_url
        if configured and (problem := await redis_server.unreachable(configured)):
            raise MeshFailed(f"redis_url: {problem}")
        return configured

    @classmethod
    def read(cls, options: MeshOptions, *, here: bool) -> "MeshInput":
        """Read the mesh file. here: whether the processes will run on this machine.

        Raises:
            SettingsError: The file or the numbers of workers are bad; names the fields.
        """
        path = options.mesh_file
        mesh = load_mesh_file(path)
        if problems := check_mesh_file(path, here=here).problems:
            raise SettingsError(f"{path}: {joined(problems)}", problems)
        text = path.read_text()
        if options.workers:
            mesh, text = _with_workers(mesh, path, options.workers)
        environment = {"PENSTOCK_LOG_LEVEL": options.log_level, "TOKENIZERS_PARALLELISM": "false"}
        if "GLIBC_TUNABLES" not in os.environ:
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # steps take half as long on some hosts
        if "HF_HUB_OFFLINE" not in os.environ and not needs_hub(mesh, path):
            environment["HF_HUB_OFFLINE"] = "1"  # libraries query the hub even for local folders
        folder = path.resolve().parent
        settings = ServiceSettings.load(mesh_folder=str(folder))
        return cls(mesh, text, folder, start_timeout_s(mesh, path), settings, environment)


def _with_workers(mesh: MeshFile, path: Path, workers: dict[str, int]) -> tuple[MeshFile, str]:
    """A mesh file with other numbers of workers. SettingsError for an unknown tier or too many workers."""
    limit, data = mesh.planner.max_instances, read_mesh_data(path)
    for name, count in workers.items():
        tier = mesh.tier(name)
        if count > max(limit, tier.workers):
            raise SettingsError(f"workers of tier {name}: at most {limit} (planner.max_instances), not {count}")
        data["tiers"][mesh.tiers.index(tier)]["workers"] = count
    return MeshFile.model_validate(data), yaml.safe_dump(data, sort_keys=False)
