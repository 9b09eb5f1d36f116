"""`penstock import-profile`: convert published step times to a profile for the planner."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, fail, print_json, print_written

MAX_PARALLEL = 1024  # GPUs of one replica; published replicas are far smaller
MAX_OVERHEAD_MS = 1000


class Source(enum.Enum):
    """Publisher of the tables."""

    VIDUR = "vidur"
    DISTSERVE = "distserve"


@needs_extra("import-profile", "planner")
def import_profile(
    source: Annotated[Source, typer.Argument(help="Publisher of the tables.")],
    files: Annotated[
        list[Path], typer.Argument(help="Table files; for Vidur: linear, attention and collectives, in any order.")
    ],
    model: Annotated[str, typer.Option("--model", help="Name of the model in the tables.")],
    shape: Annotated[str, typer.Option("--as", help="Model of the catalogue with the same shape.")],
    gpu: Annotated[
        str, typer.Option("--gpu", help="GPU of the catalogue on which the times were measured.")
    ] = "a100-80gb",
    tp: Annotated[int, options.number("--tp", help="Tensor parallelism.", least=1, most=MAX_PARALLEL)] = 1,
    pp: Annotated[int, options.number("--pp", help="Pipeline stages.", least=1, most=MAX_PARALLEL)] = 1,
    gpus_per_node: Annotated[
        int, options.number("--gpus-per-node", help="GPUs per node.", least=1, most=MAX_PARALLEL)
    ] = 8,
    topology: Annotated[
        str | None, typer.Option("--topology", help="Topology of Vidur's collectives, if several match.")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="Engine in DistServe's file: distserve or vllm.")
    ] = "distserve",
    step_overhead_ms: Annotated[
        float,
        options.number(
            "--step-overhead-ms",
            help="CPU time per step, which is not in Vidur's tables.",
            least=0,
            most=MAX_OVERHEAD_MS,
        ),
    ] = 2.0,
    max_running: Annotated[
        int, options.number("--max-running", help="Largest batch to plan with.", least=1, most=options.MAX_TOKENS)
    ] = 256,
    max_step_tokens: Annotated[
        int,
        options.number(
            "--max-step-tokens", help="Largest number of tokens in a step.", least=1, most=options.MAX_TOKENS
        ),
    ] = 2048,
    out: Annotated[Path, options.new_file("--out", help="The profile to write.")] = Path("profile.json"),
    json: targets.Json = False,
) -> None:
    """Fit the planner's latency model to published step times and report its error on held-out rows."""
    from penstock.planner_service.files import FileError, gpu_of_catalogue, model_of_catalogue
    from penstock.planner_service.files.profiles import write_profile
    from penstock.planner_service.files.published_tables import Wanted, import_distserve, import_vidur
    from penstock.planner_service.simulator import EngineLimits
    from penstock.services.domain.errors import InvalidRequest
    from penstock.services.domain.hardware import ClusterSpec, ReplicaShape, Runtime

    if source is Source.DISTSERVE and len(files) != 1:
        fail(f"DistServe's formulas are in one file, not {len(files)}", 2)
    try:
        # only the interconnect inside the measured replica matters here
        cluster = ClusterSpec(gpu_of_catalogue(gpu), -(-tp * pp // gpus_per_node), gpus_per_node, 25e9)
        target = Wanted(
            model,
            model_of_catalogue(shape),
            ReplicaShape(tp, pp),
            cluster,
            Runtime(step_overhead_s=step_overhead_ms / 1e3),
            EngineLimits(max_running, max_step_tokens),
            topology,
            engine,
        )
        imported = import_vidur(files, target) if source is Source.VIDUR else import_distserve(files[0], target)
    except (FileError, InvalidRequest, ValueError) as error:
        fail(str(error), 2)
    write_profile(out, imported)
    figures = {
        "samples": len(imported.samples),
        "mean_error": imported.mean_error,
        "held_out_error": imported.held_out_error,
        "kv_tokens": imported.replica.kv_tokens,
        "latency": imported.replica.latency,
        "out": str(out),
    }
    if json:
        print_json(figures)
        return
    console.print(
        f"{model}, {imported.replica.shape}: {len(imported.samples):,} steps fitted, mean error {imported.mean_error:.1%}, "
        f"on held-out rows {imported.held_out_error:.1%}; KV for {imported.replica.kv_tokens:,} tokens",
        highlight=False,
    )
    print_written(out)
