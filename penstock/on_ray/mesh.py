"""The side of `penstock up --on ray`: has a controller started on the cluster, waits for it, and stops the mesh.

If this process is killed, the mesh keeps running; another `up` for the same mesh file finds it.
"""

import asyncio
import importlib
import logging
import os
import secrets
from collections.abc import Callable
from types import ModuleType
from typing import Any

from penstock.on_ray import shared as shared_state
from penstock.on_ray.controller import Controller, RayMeshState
from penstock.on_ray.shared import DETACHED, NAMESPACE, Shared, controller_name
from penstock.placement.mesh import Addresses, MeshFailed
from penstock.placement.mesh_input import MeshInput, MeshOptions
from penstock.placement.running_mesh import RunningMesh
from penstock.placement.start import Progress
from penstock.services.field_problems import SettingsError
from penstock.services.settings import ServiceSettings
from penstock.services.state.users import OPERATOR

_log = logging.getLogger(__name__)

POLL_S = 0.5
LOOK_S = 5.0  # between two looks at a mesh that is ready
CALL_S = 60.0
STOP_S = 110.0
PASSED_ON = {f"PENSTOCK_{name.upper()}" for name in ServiceSettings.model_fields} - {"PENSTOCK_METRICS_PORT"}
"""Variables of this process that those of the mesh get, too, and OTEL_*. Others: by `--runtime-env`."""
SERVICES = ("router", "worker", "judge", "planner")


class RayMesh(RunningMesh):
    """A mesh on a Ray cluster that runs as long as the context lasts, or until `penstock up` finds it again.

    Raises:
        SettingsError: The mesh file or the options are bad.
        FolderInUse: Another mesh runs from the folder.
        MeshFailed: There is no such cluster, a process failed, or the mesh was not ready in time. All processes have been
            stopped.
    """

    def __init__(self, on: str, options: MeshOptions, on_progress: Callable[[Progress], None] = lambda _: None) -> None:
        """on: `ray`, the cluster of this machine or of RAY_ADDRESS, or `ray://host:port`, a server of Ray's clients."""
        self._address = "auto" if on == "ray" else on
        super().__init__(options, on_progress, here=False)
        _check(self._input)
        self._runtime_env = options.ray_runtime_env()
        self._ray: ModuleType = importlib.import_module("ray")
        self._controller: Any = None
        self._state: RayMeshState

    async def _start(self) -> None:
        await self._connect(self._shared(await self._input.configured_redis()))
        self._stack.push_async_callback(self._stop)
        await self._until_ready()
        self.redis_url = self._state.redis_url

    @property
    def addresses(self) -> Addresses:
        return self._state.addresses

    async def failed(self) -> str:
        """Keep the run file true for as long as the mesh runs; return why it does not."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._state = await self._call(self._controller.state)
            except self._ray.exceptions.GetTimeoutError as error:
                _log.warning("the controller on Ray does not answer: %s", error)
            except self._ray.exceptions.RayActorError:
                return "the mesh was stopped by another command"
            else:
                self._update_run_file()

    async def _until_ready(self) -> None:
        while True:
            state = self._state = await self._call(self._controller.state)
            self._report(state.progress)
            if state.failure:
                raise MeshFailed(state.failure)
            if state.ready:
                return
            await asyncio.sleep(POLL_S)

    async def _connect(self, shared: Shared) -> None:
        """Find the controller of the mesh, or start one."""
        ray, name = self._ray, controller_name(self.mesh.name)
        try:
            await asyncio.to_thread(
                ray.init, self._address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
            )
        except (ConnectionError, RuntimeError) as error:
            raise MeshFailed(f"--on: no Ray cluster at {self._address}: {error}") from None
        self._stack.callback(ray.shutdown)
        env = dict(shared.runtime_env)
        make = ray.remote(Controller).options(name=name, max_task_retries=-1, num_cpus=0, runtime_env=env, **DETACHED)
        self._controller = await asyncio.to_thread(make.remote, self.mesh.name, shared)
        if await self._call(self._controller.mesh_text) != self._input.text:
            raise MeshFailed(f"a mesh '{self.mesh.name}' with another mesh file runs on this cluster: stop it first")
        await self._call(self._controller.renew_files, shared.files)

    async def _call(self, method: Any, *arguments: object, timeout_s: float = CALL_S) -> Any:
        """The result of an actor's method."""
        return await asyncio.to_thread(lambda: self._ray.get(method.remote(*arguments), timeout=timeout_s))

    async def _stop(self) -> None:
        await self._call(self._controller.stop, timeout_s=STOP_S)
        self._ray.kill(self._controller, no_restart=True)
        await asyncio.to_thread(shared_state.remove, self.mesh.name)

    def _shared(self, redis_url: str) -> Shared:
        given = {n: v for n, v in os.environ.items() if n in PASSED_ON or n.startswith(("OTEL_", "HF_HUB_OFFLINE"))}
        return Shared(
            run=secrets.token_hex(8),
            mesh_text=self._input.text,
            folder="" if "working_dir" in self._runtime_env else str(self._input.folder),
            environment={**given, **self._input.environment},
            files=_files(self._input),
            start_timeout_s=self._input.start_timeout_s,
            redis_url=redis_url,
            redis_passwords={} if redis_url else {r: secrets.token_urlsafe(24) for r in (*SERVICES, OPERATOR)},
            runtime_env=self._runtime_env,
        )


def _check(given: MeshInput) -> None:
    """SettingsError where processes on several hosts could not reach each other, or Ray gives them other GPUs."""
    closed = given.tls_folder is not None and given.settings.key_file(given.mesh) is not None
    if not closed and not given.settings.open_access:
        needed = "certificates (tls.folder) and keys (access.keys), or PENSTOCK_OPEN_ACCESS=true in a private network"
        raise SettingsError(f"--on ray: processes on several hosts need {needed}")
    for i, tier in enumerate(given.mesh.tiers):
        if tier.device.startswith("cuda:"):
            raise SettingsError(f"tiers[{i}].device: {tier.device}, but Ray chooses the GPUs: cuda")
        for name in ("gpus", "port"):
            if tier.options.get(name):
                raise SettingsError(f"tiers[{i}].{tier.engine}.{name}: Ray chooses the hosts and GPUs: leave it out")


def _files(given: MeshInput) -> dict[str, str]:
    """The certificates of each role, and the routers' keys."""
    files = dict[str, str]()
    if (folder := given.tls_folder) is not None:
        parts = ((role, name) for role in SERVICES for name in ("ca.pem", f"{role}.pem"))
        files = {f"{role}/tls/{name}": (folder / name).read_text() for role, name in parts}
    keys = given.settings.key_file(given.mesh)
    return files if keys is None else files | {"router/keys": keys.read_text()}
