"""`penstock demo`: run the shipped models on held-out prompts and report accuracy, CPU time and latency."""

import asyncio
import json as json_module
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import demo_report, demo_run, options, targets
from penstock.cli.held_out import Question, read_questions
from penstock.cli.local import started
from penstock.cli.output import cli_error_handling, console, failing_on, needs_extra, print_json, progress
from penstock.cli.replay import Run, arrivals_s, replay
from penstock.client.aio import AsyncClient
from penstock.client.aio_planner import AsyncPlannerClient
from penstock.question_files.errors import FileError

if TYPE_CHECKING:
    from penstock.local.mesh import LocalMesh
    from penstock.placement.mesh_input import MeshOptions

OFFERED_SHARE = 0.5  # of what the last tier sustains alone, by default: it must keep up with bursts, to be compared
RUN_S = 18.0  # of the runs, by default: with three tiers, all of them take less than two minutes
LEAST_PROMPTS, MOST_PROMPTS = 30, 100  # of a run, by default
SEED = 1  # of the arrivals


@needs_extra("demo", "demo")
def demo(
    mesh: Annotated[
        Path | None, typer.Option("--mesh", "-m", help="The mesh file; default: the shipped models'.")
    ] = None,
    prompts: Annotated[
        int | None,
        options.count(
            f"Held-out prompts of each run; default: as many as arrive in {RUN_S:g} s, at most {MOST_PROMPTS}."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        options.rate(f"Prompts per second; default: {OFFERED_SHARE:.0%} of what the largest tier sustains alone."),
    ] = None,
    concurrency: Annotated[
        int,
        options.number(
            "Prompts in flight while it is measured what the largest tier sustains.", 1, options.MAX_CONCURRENCY
        ),
    ] = 16,
    questions: Annotated[
        Path | None, typer.Option(help="Prompts with their answers; default: those held out from training.")
    ] = None,
    out: Annotated[Path, options.new_file("The JSON file to write.")] = Path("demo.json"),
    folder: targets.Folder = Path(".penstock/demo"),
    json: targets.Json = False,
) -> None:
    """Start a mesh, send held-out prompts to each tier and to the cascade, kill a worker, show the results, stop the mesh.

    All runs get the same prompts at the same times. Accuracy is measured against the known answers. None of the prompts was
    in the training data.
    """
    from penstock.placement.mesh_input import MeshOptions

    shipped = Path(str(resources.files("penstock.demo_data")))
    with failing_on(FileError):
        held_out = read_questions(questions or shipped / "models/heldout.jsonl", prompts or LEAST_PROMPTS)
    mesh_options = MeshOptions(mesh or shipped / "mesh.yaml", folder, any_ports=True)
    with cli_error_handling("the mesh of the demo"):
        figures = asyncio.run(_run(mesh_options, held_out, prompts, rate, concurrency, quiet=json))
    out.write_text(json_module.dumps(figures, indent=2) + "\n")
    if json:
        print_json(figures)
    else:
        demo_report.show(figures, out, console)


async def _run(
    mesh_options: "MeshOptions",
    held_out: Sequence[Question],
    prompts: int | None,
    rate: float | None,
    concurrency: int,
    *,
    quiet: bool,
) -> dict[str, Any]:
    from penstock.local.mesh import LocalMesh

    async with started(partial(LocalMesh, mesh_options), quiet=quiet) as mesh:
        assert mesh is not None
        tiers = [tier.name for tier in mesh.mesh.tiers if tier.workers]
        with progress(quiet=quiet, transient=False) as bars:
            async with (
                AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin) as client,
                AsyncPlannerClient(mesh.addresses.planner) as planner,
            ):
                # other prompts than those of the runs, whose KV the tiers would have in their caches
                others = held_out[-(demo_run.LONE_PROMPTS + demo_run.BURST_PROMPTS) :]
                for model in (*tiers, "cascade"):
                    await demo_run.warm_up(client, model, others)
                pace = await demo_run.pace_of(client, tiers[-1], others, concurrency)
                rate_per_s = rate or OFFERED_SHARE * pace.sustained_per_s
                count = prompts or min(len(held_out), MOST_PROMPTS, max(LEAST_PROMPTS, round(RUN_S * rate_per_s)))
                times_s = arrivals_s(count, rate_per_s, SEED)
                runs = dict[str, Run]()

                # each with a cache of its own: what one run has computed does not help the next one
                async def run(name: str, model: str) -> None:
                    bar = bars.add_task(name.ljust(8), total=count)
                    runs[name] = await replay(
                        client,
                        held_out[:count],
                        [model] * count,
                        times_s,
                        lambda: mesh_cpu_s(mesh),
                        timeout_s=demo_run.TIMEOUT_S,
                        cache_salt=name,
                        on_reply=partial(bars.advance, bar),
                    )

                for model in ("cascade", *tiers):
                    await run(model, model)
                if any(tier.skip_below is not None for tier in mesh.mesh.tiers):
                    without = partial(replace, skip_below=None)
                    async with demo_run.changed_plan(client, planner, "no tier is passed over", without):
                        await run(demo_report.PLAIN, "cascade")
                failover = await demo_run.fail_over(
                    client, held_out[-demo_run.FAILOVER_PROMPTS :], lambda instance: _process_of(mesh, instance)
                )
    return demo_report.figures_of(tiers, runs, failover, pace, concurrency=concurrency, rate_per_s=rate_per_s)


def mesh_cpu_s(mesh: "LocalMesh") -> float:
    """CPU seconds that the processes of the mesh have used so far. This process, the client, is not one of them."""
    from penstock.local.cpu_time import group_cpu_s

    return group_cpu_s(entry.pid for entry in mesh.watcher.watched.values() if entry.pid is not None)


def _process_of(mesh: "LocalMesh", instance_id: str) -> tuple[str, int] | None:
    """The name and id of the process of an instance; None if it is not running. Instance ids end with the process id."""
    number = instance_id.rpartition("-")[2]
    running = ((name, entry.pid) for name, entry in mesh.watcher.watched.items() if entry.pid is not None)
    return next(((name, pid) for name, pid in running if str(pid) == number), None)
