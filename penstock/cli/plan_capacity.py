"""`penstock plan capacity`: the fewest GPUs with which one tier attains the SLOs of a trace."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options, slo_attainment, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, fail, print_json
from penstock.cli.planner_errors import planner_error_handling


@needs_extra("plan capacity", "planner")
def capacity(
    cluster: Annotated[Path, typer.Option("--cluster", help="YAML file: GPUs and nodes.")],
    models: Annotated[Path, typer.Option("--models", help="YAML file: the tiers and their models.")],
    trace: Annotated[
        Path, typer.Option("--trace", help="CSV file, may be gzipped: arrival_s, input_tokens, output_tokens.")
    ],
    slo: Annotated[list[str], options.slo_classes("--slo", help="A class of requests with SLOs. Repeatable.")],
    attainment: Annotated[
        float,
        options.number(
            "--attainment", help="Share of the SLOs to attain, of all that arrive.", least=0, most=1, above=True
        ),
    ] = 0.9,
    tier: Annotated[str | None, typer.Option("--tier", help="Tier of the models file; default: the last.")] = None,
    requests: options.ReplayedRequests = None,
    rate: options.TraceRate = None,
    seed: Annotated[int, options.seed("--seed", help="Seed of the stretch of the trace and of the classes.")] = 1,
    json: targets.Json = False,
) -> None:
    """Compute the fewest GPUs with which a trace attains its SLOs, for one tier, and the rate that they sustain."""
    from planner_service.demand import stretch_of
    from planner_service.files import read_site, read_trace
    from planner_service.plan_file import group_json
    from planner_service.slo_simulation import fewest_gpus

    with planner_error_handling():
        classes = slo_attainment.read_classes(slo)
        site = read_site(cluster, models)
        name = site.tiers[-1] if tier is None else tier
        if name not in site.tiers:
            fail(f"--tier: no tier '{name}' in {models}; there are {', '.join(site.tiers)}", 2)
        arrivals = read_trace(trace)
        count = min(options.DEFAULT_REPLAY, len(arrivals)) if requests is None else requests
        work = stretch_of(arrivals, count, seed, rate)
        result = fewest_gpus(site, site.tiers.index(name), work, classes, attainment, seed)
    figures = {
        "tier": name,
        "gpus": result.gpus,
        "replicas": [group_json(result.replica.shape, result.replicas)],
        "rate_per_s": work.rate_per_s,
        "target_attainment": attainment,
        "attainment": result.attainment,
        "capacity_per_s": result.capacity_per_s,
        "capacity_per_gpu_s": result.capacity_per_s / result.gpus,
        "requests": len(work),
        "seed": seed,
        "slo": slo_attainment.classes_json(classes, result.classes),
    }
    if json:
        print_json(figures)
        return
    console.print(
        f"{name}: {result.gpus} GPUs ({result.replicas} x {result.replica.shape}) attain {result.attainment:.1%} of the SLOs "
        f"at {work.rate_per_s:.3g} requests/s; {attainment:.0%} up to {result.capacity_per_s:.3g} requests/s, "
        f"{result.capacity_per_s / result.gpus:.3g} per GPU",
        highlight=False,
        soft_wrap=True,
    )
    slo_attainment.show(result.classes)
