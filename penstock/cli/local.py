"""`penstock up` and `penstock down`: the mesh on this machine."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Table

from penstock.cli import targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, fail, print_json, tier_counts

if TYPE_CHECKING:
    from penstock.local import LocalMesh, MeshOptions
    from penstock.local.mesh import Progress

DETACH_TIMEOUT_S = 200.0
DOWN_TIMEOUT_S = 90.0

MeshFileOption = Annotated[Path, typer.Option("--mesh", "-m", help="The mesh file.")]


@needs_extra("up", "mesh")
def up(
    mesh: MeshFileOption = Path("mesh.yaml"),
    folder: targets.Folder = targets.FOLDER,
    worker: Annotated[
        list[str] | None, typer.Option("--worker", help="TIER=COUNT: so many workers instead of the mesh file's.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the mesh serves.")] = False,
    json: targets.Json = False,
) -> None:
    """Start the mesh that the mesh file describes; Ctrl-C stops it."""
    from penstock.local import MeshOptions, read_run_file

    running = read_run_file(folder)
    if running is not None:
        fail(f"a mesh runs from {folder} already (process {running.pid}); `penstock down` stops it")
    counts = tier_counts("--worker", worker or [])
    if detach:
        _detached(mesh, folder, worker or [], json)
        return
    options = MeshOptions(mesh, folder, counts)
    asyncio.run(run(options, json=json))


def down(folder: targets.Folder = targets.FOLDER) -> None:
    """Stop the mesh that runs from the folder, letting running requests end."""
    from penstock.local.runfile import read_run_file

    running = read_run_file(folder)
    if running is None:
        fail(f"no mesh runs from {folder}")
    os.kill(running.pid, signal.SIGTERM)
    until = time.monotonic() + DOWN_TIMEOUT_S
    while read_run_file(folder) is not None or _alive(running.pid):
        if time.monotonic() > until:
            fail(f"process {running.pid} is still there after {DOWN_TIMEOUT_S:g} s")
        time.sleep(0.1)
    console.print("The mesh has stopped.")


async def run(options: "MeshOptions", *, json: bool) -> None:
    """Run the mesh in the foreground until a signal comes or something cannot run."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with started(options, stop=stop, quiet=json) as mesh:
        if mesh is None:
            return
        if json:
            print_json({"grpc": mesh.grpc_addresses, "http": mesh.http_addresses, "redis_url": mesh.redis_url})
        else:
            console.print(f"gRPC    {', '.join(mesh.grpc_addresses)}")
            console.print(f"OpenAI  {', '.join(f'http://{a}/v1' for a in mesh.http_addresses)}")
            console.print(f"Logs    {options.folder / 'logs'}")
            console.print("Try     penstock ask 'What is 12 + 30?'    Ctrl-C stops the mesh.", highlight=False)
        failed = asyncio.create_task(mesh.failed())
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait({failed, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not json:
            console.print("Stopping ...")
        if failed.done():
            fail(failed.result())
        failed.cancel()


class started:  # noqa: N801 -- reads as a function: `async with started(...) as mesh`
    """A running mesh, with its progress shown while it starts; None if `stop` was set first."""

    def __init__(self, options: "MeshOptions", *, stop: asyncio.Event | None = None, quiet: bool = False) -> None:
        self._options, self._stop, self._quiet = options, stop, quiet
        self._mesh: LocalMesh | None = None

    async def __aenter__(self) -> "LocalMesh | None":
        from penstock.local import LocalMesh, MeshFailed
        from penstock.local.redis_server import NoRedis
        from services.settings import SettingsError

        began = time.monotonic()
        try:
            with Live(console=console, transient=True, refresh_per_second=8) as live:

                def show(progress: "Progress") -> None:
                    if not self._quiet:
                        live.update(_progress_table(progress, time.monotonic() - began))

                mesh = LocalMesh(self._options, show)
                entering = asyncio.create_task(mesh.__aenter__())
                waits = {entering}
                if self._stop is not None:
                    waits.add(asyncio.create_task(self._stop.wait()))  # type: ignore[arg-type]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if not entering.done():
                    entering.cancel()
                    await asyncio.gather(entering, return_exceptions=True)
                    return None
                await entering
        except (MeshFailed, NoRedis, SettingsError) as error:
            fail(str(error))
        self._mesh = mesh
        if not self._quiet:
            console.print(f"The mesh serves after {time.monotonic() - began:.1f} s.")
        return mesh

    async def __aexit__(self, *details: object) -> None:
        if self._mesh is not None:
            await self._mesh.__aexit__(None, None, None)


def _detached(mesh: Path, folder: Path, worker: list[str], json: bool) -> None:
    from penstock.local.runfile import read_run_file

    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "up.log"
    arguments = [sys.executable, "-m", "penstock.cli.main", "up", "--mesh", str(mesh), "--folder", str(folder)]
    arguments += [part for option in worker for part in ("--worker", option)]
    with log.open("w") as out:
        child = subprocess.Popen(arguments, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + DETACH_TIMEOUT_S
    with console.status("Starting the mesh ..."):
        while (running := read_run_file(folder)) is None or running.pid != child.pid:
            if child.poll() is not None:
                fail(log.read_text().strip().removeprefix("penstock: "))
            if time.monotonic() > until:
                child.terminate()
                fail(f"not ready after {DETACH_TIMEOUT_S:g} s; {log} has more")
            time.sleep(0.1)
    if json:
        print_json({"grpc": running.grpc, "http": running.http, "redis_url": running.redis_url})
    else:
        console.print(f"The mesh serves: gRPC {', '.join(running.grpc)}, OpenAI http://{running.http[0]}/v1")


def _progress_table(progress: "Progress", elapsed_s: float) -> Table:
    table = Table.grid(padding=(0, 2))
    for kind, wanted in progress.wanted.items():
        ready = progress.ready.get(kind, 0)
        mark = "[green]ready[/]" if ready >= wanted else "[yellow]starting[/]"
        table.add_row(kind, f"{ready}/{wanted}", mark)
    table.add_row(f"[dim]{elapsed_s:.0f} s[/]")
    return table


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
