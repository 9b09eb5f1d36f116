"""`penstock plan capacity`: the fewest GPUs with which one tier attains the SLOs of a trace."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options, slo_attainment, targets
from penstock.cli.output import needs_extra, planner_error_handling, print_json, print_line


@needs_extra("plan capacity", "planner")
def capacity(
    cluster: Annotated[Path, typer.Option(help="YAML file: GPUs and nodes.")],
    models: Annotated[Path, typer.Option(help="YAML file: the tiers and their models.")],
    trace: Annotated[Path, typer.Option(help="CSV file, may be gzipped: arrival_s, input_tokens, output_tokens.")],
    slo: Annotated[list[str], options.slo_classes("A class of requests with SLOs. Repeatable.")],
    attainment: Annotated[
        float, options.number("Share of the SLOs to attain, of all that arrive.", 0, 1, above=True)
    ] = 0.9,
    tier: Annotated[str | None, typer.Option(help="Tier of the models file; default: the last.")] = None,
    requests: options.ReplayedRequests = None,
    rate: options.TraceRate = None,
    seed: Annotated[int, options.seed("Seed of the stretch of the trace and of the classes.")] = 1,
    json: targets.Json = False,
) -> None:
    """Compute the fewest GPUs with which a trace attains its SLOs, for one tier, and the rate that they sustain."""
    from penstock.planner_service.api import slos
    from penstock.question_files.questions import load_cluster, load_models
    from penstock.question_files.tables import load_trace
    from penstock.services.domain.hardware import replica_words

    with planner_error_handling():
        classes = slo_attainment.read_classes(slo)
        given = load_cluster(cluster), load_models(models), load_trace(trace), classes
        result = slos.capacity(*given, attainment=attainment, tier=tier, requests=requests, rate=rate, seed=seed)
    if json:
        print_json(result)
        return
    (group,) = result.replicas
    print_line(
        f"{result.tier}: {result.gpus} GPUs ({replica_words([group])}) attain {result.attainment:.1%} of the "
        f"SLOs at {result.rate_per_s:.3g} requests/s; {attainment:.0%} up to {result.capacity_per_s:.3g} requests/s, "
        f"{result.capacity_per_gpu_s:.3g} per GPU"
    )
    slo_attainment.show(result.slo)
