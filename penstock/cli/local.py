"""`penstock up` and `penstock down`: start and stop a mesh on this machine or on a Ray cluster."""

import asyncio
import importlib.util
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from penstock.cli import options, targets
from penstock.cli.output import console, fail, failing_on, needs_extra, print_json, print_line
from penstock.local import runfile

if TYPE_CHECKING:
    from penstock.local.mesh import LocalMesh
    from penstock.on_ray.mesh import RayMesh
    from penstock.placement.mesh_input import MeshOptions
    from penstock.placement.running_mesh import RunningMesh
    from penstock.placement.start import Progress

DETACH_MARGIN_S = 60.0  # more than the mesh's own start time-out, after which it ends with the reason
DOWN_TIMEOUT_S = 120.0  # four groups of processes are stopped in sequence, each killed after its own time-out
POLL_S = 0.1
REPEAT_S = 30.0  # without progress, the status line is repeated after this long
LOADING_S = 5.0  # and while models are loaded, whose progress it tells
INTERRUPTED = 130  # exit status after Ctrl-C

LOCAL, RAY, KUBERNETES = "local", "ray", "kubernetes"

MeshFileOption = Annotated[Path, typer.Option("--mesh", "-m", help="The mesh file.")]


@needs_extra("up", "mesh")
def up(
    mesh: MeshFileOption = Path("mesh.yaml"),
    folder: targets.Folder = targets.FOLDER,
    worker: Annotated[
        list[str] | None, typer.Option(help="TIER=COUNT: number of workers instead of the mesh file's.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; return once the mesh is ready.")
    ] = False,
    on: Annotated[
        str, typer.Option(help="Where: local; ray, the cluster of this machine or RAY_ADDRESS; ray://HOST:PORT.")
    ] = LOCAL,
    runtime_env: Annotated[Path | None, typer.Option(help="YAML file with Ray's runtime_env of the processes.")] = None,
    json: targets.Json = False,
    in_background: Annotated[bool, typer.Option(hidden=True)] = False,  # what --detach starts
) -> None:
    """Start the mesh that the mesh file describes; Ctrl-C stops it."""
    _check_place(on, runtime_env)
    from penstock.placement.mesh_input import MeshOptions

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--folder: {folder}: {error.strerror}", 2)
    running = runfile.read_run_file(folder)
    if running is not None:
        fail(f"a mesh is running from {folder} already (process {running.pid}); stop it with `penstock down`")
    counts = options.tier_values("--worker", "TIER=COUNT", worker, options.worker_count)
    if detach:
        more = [part for option in worker or [] for part in ("--worker", option)]
        more += ["--on", on, *(() if runtime_env is None else ("--runtime-env", str(runtime_env)))]
        _detached(mesh, folder, more, json)
        return
    mesh_options = MeshOptions(mesh, folder, counts, runtime_env=runtime_env)
    asyncio.run(run(mesh_options, on=on, json=json, in_background=in_background))


def _check_place(on: str, runtime_env: Path | None) -> None:
    """End the command if the mesh cannot be started there."""
    if on == KUBERNETES:
        fail("--on: on Kubernetes the chart places the processes: see `penstock values`", 2)
    if on not in (LOCAL, RAY) and not on.startswith("ray://"):
        fail(f"--on: must be local, ray or ray://HOST:PORT, not '{on}'", 2)
    if on == LOCAL and runtime_env is not None:
        fail("--runtime-env: is for --on ray", 2)
    if on != LOCAL and importlib.util.find_spec("ray") is None:
        fail('penstock up --on ray needs the ray extra: pip install "penstock-mesh[ray]"', 2)


def down(folder: targets.Folder = targets.FOLDER) -> None:
    """Stop the mesh of the folder, after its running requests have finished."""
    running = runfile.read_run_file(folder)
    process = running.process if running is not None else runfile.lock_holder(folder)
    if process is None or not process.send(signal.SIGTERM):
        stale = runfile.stale_run_file(folder)
        fail(f"no mesh is running from {folder}" + (f": {stale}; the next `penstock up` replaces it" if stale else ""))
    until = time.monotonic() + DOWN_TIMEOUT_S
    while process.runs:
        if time.monotonic() > until:
            fail(f"process {process.pid} has not ended within {DOWN_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    console.print("The mesh has stopped.")


async def run(options: "MeshOptions", *, on: str, json: bool, in_background: bool) -> None:
    """Run the mesh in the foreground until a signal arrives or a process fails for good."""
    from penstock.services.mesh_check import judging

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with started(mesh_on(on, options), stop=stop, quiet=json) as mesh:
        if mesh is None:
            fail("interrupted: all processes have been stopped", INTERRUPTED)
        running = runfile.read_run_file(options.folder)
        assert running is not None
        if json:
            print_json(_reached(running))
        else:
            scheme = "http" if mesh.tls_folder is None else "https"
            console.print(f"gRPC    {', '.join(running.grpc)}")
            console.print(f"OpenAI  {', '.join(f'{scheme}://{a}/v1' for a in running.http)}")
            for line in judging(mesh.mesh, mesh.gives_logprobs):
                print_line(f"Judge   {line}")
            logs = options.folder / "logs" if on == LOCAL else f"ray logs cluster 'penstock-{mesh.mesh.name}-*'"
            console.print(f"Logs    {logs}", highlight=False)
            console.print(f"Metrics {options.folder / runfile.METRICS_NAME} (targets for Prometheus' file_sd_configs)")
            command = targets.command_for(options.folder)
            stop_hint = "" if in_background else "    Stop it with Ctrl-C."
            print_line(f"Try     {command} ask 'What is 12 + 30?'{stop_hint}")
        failed = asyncio.create_task(mesh.failed())
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait({failed, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not json:
            console.print("Stopping ...")
        if failed.done():
            fail(failed.result())
        failed.cancel()


Mesh = TypeVar("Mesh", bound="RunningMesh")


def mesh_on(on: str, options: "MeshOptions") -> "Callable[[Callable[[Progress], None]], LocalMesh | RayMesh]":
    """A mesh on this machine, or on a Ray cluster."""
    if on == LOCAL:
        from penstock.local.mesh import LocalMesh

        return partial(LocalMesh, options)
    from penstock.on_ray.mesh import RayMesh

    return partial(RayMesh, on, options)


@asynccontextmanager
async def started(
    make: "Callable[[Callable[[Progress], None]], Mesh]", *, stop: asyncio.Event | None = None, quiet: bool = False
) -> "AsyncIterator[Mesh | None]":
    """Run a mesh and show its progress while it starts. Gives None if `stop` is set before it is ready."""
    from penstock.local.redis_server import NoRedis
    from penstock.placement.mesh import MeshFailed
    from penstock.services.field_problems import SettingsError

    began, lines, stop = time.monotonic(), ProgressLines(), stop or asyncio.Event()

    def show(progress: "Progress") -> None:
        if not quiet and (line := lines.next(progress, time.monotonic() - began)) is not None:
            print_line(line)

    mesh = None
    with failing_on(runfile.FolderInUse, MeshFailed, NoRedis, SettingsError):
        mesh = make(show)
        entering, stopping = asyncio.create_task(mesh.__aenter__()), asyncio.create_task(stop.wait())
        await asyncio.wait({entering, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not entering.done():
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
            mesh = None
        else:
            await entering
    if mesh is None:
        yield None
        return
    if not quiet:
        console.print(f"The mesh is ready after {time.monotonic() - began:.1f} s.")
    try:
        yield mesh
    finally:
        await mesh.__aexit__(None, None, None)


def _detached(mesh: Path, folder: Path, options: list[str], json: bool) -> None:
    """Start `penstock up` as a background process; show its progress until it is ready, or the reason why it failed."""
    from penstock.placement.start import start_timeout_s
    from penstock.services.field_problems import SettingsError
    from penstock.services.mesh_file import load_mesh_file

    with failing_on(SettingsError, runfile.FolderInUse):
        limit_s = start_timeout_s(load_mesh_file(mesh), mesh) + DETACH_MARGIN_S
        lock = runfile.FolderLock(folder)
        lock.acquire()
    log = folder / "up.log"
    arguments = [sys.executable, "-m", "penstock.cli.main", "up", "--mesh", str(mesh), "--folder", str(folder)]
    arguments += ["--in-background", *options]
    with log.open("wb") as out:
        child = lock.start_holder(arguments, out)
    until, shown = time.monotonic() + limit_s, 0
    try:
        while True:
            running = runfile.read_run_file(folder)
            is_ready = running is not None and running.pid == child.pid
            has_ended = child.poll() is not None  # before the log is read, so that its last lines are in it
            text = log.read_text(errors="replace")
            complete, failed, reason = text.partition("penstock: ")
            if not json and (fresh := complete[shown : complete.rfind("\n") + 1]):
                print_line(fresh.rstrip("\n"))
                shown += len(fresh)
            if running is not None and is_ready:
                break
            if has_ended:
                fail(reason.strip() if failed else f"the mesh ended with status {child.returncode}; see {log}")
            if time.monotonic() > until:
                child.terminate()
                fail(f"not ready after {limit_s:g} s; see {log}")
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        child.terminate()
        child.wait(DOWN_TIMEOUT_S)
        fail("interrupted: all processes have been stopped", INTERRUPTED)
    if json:
        print_json(_reached(running))
    else:
        scheme = "https" if running.tls_folder else "http"
        console.print(f"The mesh is ready: gRPC {', '.join(running.grpc)}, OpenAI {scheme}://{running.http[0]}/v1")
        print_line(f"Stop it with `{targets.command_for(folder)} down`.")


def _reached(running: runfile.RunFile) -> dict[str, object]:
    return {name: getattr(running, name) for name in ("grpc", "http", "admin", "redis_url")}


class ProgressLines:
    """The start of a mesh as lines of text: new instances, and those that are missing."""

    def __init__(self) -> None:
        self._up: frozenset[str] = frozenset()
        self._last, self._last_s = "", 0.0

    def next(self, progress: "Progress", elapsed_s: float) -> str | None:
        """The next line; None if nothing has changed since the last one, which is repeated after `REPEAT_S`."""
        fresh = sorted(set(progress.instances) - self._up)
        self._up = frozenset(progress.instances)
        up = f"{', '.join(fresh)} up; " if fresh else ""
        ready, expected = progress.ready, progress.expected
        missing = [
            f"{kind} ({ready.get(kind, 0)} of {expected[kind]})" if expected[kind] > 1 else kind
            for kind in progress.missing
        ]
        line = up + (f"waiting for {', '.join(missing)}" if missing else "all ready")
        if line == self._last and elapsed_s - self._last_s < (LOADING_S if progress.loading else REPEAT_S):
            return None
        self._last, self._last_s = line, elapsed_s
        loading = "".join(f"; {kind} is loading: {how_far}" for kind, how_far in progress.loading.items())
        return f"{elapsed_s:4.0f} s  {line}{loading}"
