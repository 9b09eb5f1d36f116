"""`penstock import-profile`: published step times as a profile for the planner."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, fail, print_json, print_written

MAX_PARALLEL = 1024  # GPUs of one replica, far beyond any that was published
MAX_OVERHEAD_MS = 1000


class Source(enum.Enum):
    """Whose tables."""

    VIDUR = "vidur"
    DISTSERVE = "distserve"


@needs_extra("import-profile", "planner")
def import_profile(
    source: Annotated[Source, typer.Argument(help="Whose tables.")],
    files: Annotated[
        list[Path], typer.Argument(help="The tables; Vidur's linear, attention and collectives in any order.")
    ],
    model: Annotated[str, typer.Option("--model", help="The model's name in the tables.")],
    shape: Annotated[str, typer.Option("--as", help="The catalogue's model of its shape.")],
    gpu: Annotated[str, typer.Option("--gpu", help="The catalogue's GPU that was measured.")] = "a100-80gb",
    tp: Annotated[int, options.number("--tp", help="Tensor parallelism.", least=1, most=MAX_PARALLEL)] = 1,
    pp: Annotated[int, options.number("--pp", help="Pipeline stages.", least=1, most=MAX_PARALLEL)] = 1,
    gpus_per_node: Annotated[
        int, options.number("--gpus-per-node", help="GPUs of a node.", least=1, most=MAX_PARALLEL)
    ] = 8,
    topology: Annotated[
        str | None, typer.Option("--topology", help="Of Vidur's collectives, where several fit.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="Of DistServe's file: distserve or vllm.")] = "distserve",
    step_overhead_ms: Annotated[
        float,
        options.number(
            "--step-overhead-ms",
            help="CPU time per step, which Vidur's tables leave out.",
            least=0,
            most=MAX_OVERHEAD_MS,
        ),
    ] = 2.0,
    max_running: Annotated[
        int, options.number("--max-running", help="Largest batch to plan with.", least=1, most=options.MAX_TOKENS)
    ] = 256,
    max_step_tokens: Annotated[
        int, options.number("--max-step-tokens", help="Tokens in a step.", least=1, most=options.MAX_TOKENS)
    ] = 2048,
    out: Annotated[Path, options.new_file("--out", help="Where the profile goes.")] = Path("profile.json"),
    json: targets.Json = False,
) -> None:
    """Fit the planner's latency model to published step times, and say how far it is off on rows kept from the fit."""
    from planner_service.files import FileError, gpu_of_catalogue, model_of_catalogue
    from planner_service.importers import Wanted, import_distserve, import_vidur
    from planner_service.profiles import write_profile
    from planner_service.simulator import EngineLimits
    from services.domain.errors import InvalidRequest
    from services.domain.hardware import ClusterSpec, ReplicaShape, Runtime

    if source is Source.DISTSERVE and len(files) != 1:
        fail(f"DistServe's formulas are in one file, not {len(files)}", 2)
    try:
        # of the cluster only what is inside the measured replica matters here
        cluster = ClusterSpec(gpu_of_catalogue(gpu), -(-tp * pp // gpus_per_node), gpus_per_node, 25e9)
        wanted = Wanted(
            model,
            model_of_catalogue(shape),
            ReplicaShape(tp, pp),
            cluster,
            Runtime(step_overhead_s=step_overhead_ms / 1e3),
            EngineLimits(max_running, max_step_tokens),
            topology,
            engine,
        )
        found = import_vidur(files, wanted) if source is Source.VIDUR else import_distserve(files[0], wanted)
    except (FileError, InvalidRequest, ValueError) as error:
        fail(str(error), 2)
    write_profile(out, found)
    figures = {
        "samples": len(found.samples),
        "mean_error": found.mean_error,
        "held_out_error": found.held_out_error,
        "kv_tokens": found.replica.kv_tokens,
        "latency": found.replica.latency,
        "out": str(out),
    }
    if json:
        print_json(figures)
        return
    console.print(
        f"{model}, {found.replica.shape}: {len(found.samples):,} steps fitted, mean error {found.mean_error:.1%}, "
        f"on rows kept from the fit {found.held_out_error:.1%}; KV for {found.replica.kv_tokens:,} tokens",
        highlight=False,
    )
    print_written(out)
