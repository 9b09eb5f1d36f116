"""`penstock simulate`: replay a trace under a plan, without a mesh."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options, plan_report, slo_attainment, targets
from penstock.cli.output import console, needs_extra, planner_error_handling, print_json, print_line, seconds, table_of
from penstock.types.planning import Dispatch, LengthSource, PlanOptions


@needs_extra("simulate", "planner")
def simulate(
    plan: Annotated[Path, typer.Option(help="A plan file of `penstock plan`.")],
    trace: Annotated[Path, typer.Option(help=options.TRACE_COLUMNS)],
    requests: options.ReplayedRequests = None,
    seed: options.SelectionSeed = 1,
    lengths: Annotated[
        LengthSource, typer.Option(help="Source of the token counts: quality or trace.")
    ] = LengthSource.QUALITY,
    rate: options.TraceRate = None,
    ignore_cached: Annotated[
        bool | None,
        typer.Option(
            help="Compute all prompts whole, whatever the trace's cached_tokens say. Default: as the plan was made."
        ),
    ] = None,
    dispatch: Annotated[
        Dispatch | None,
        typer.Option(
            help="How requests are distributed over replicas: capacity, round-robin, or pending-work, as routers do. "
            "Default: as planned. The attainment of --slo has its own placement."
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        options.slo_classes("A class of requests with SLOs: their attainment is reported. Repeatable."),
    ] = None,
    json: targets.Json = False,
) -> None:
    """Replay a trace under a plan in virtual time, with the batch scheduler of the workers."""
    from penstock.planner_service.api.simulations import simulate_plan
    from penstock.planner_service.codecs.plan_file import read_plan
    from penstock.question_files.tables import load_trace

    with planner_error_handling():
        classes = slo_attainment.read_classes(slo or [])
        file = read_plan(plan)
        whole = file.inputs.ignore_cached if ignore_cached is None else ignore_cached
        used = dispatch or file.plan.dispatch
        drawn = PlanOptions(
            requests=requests, seed=seed, lengths=lengths, rate=rate, ignore_cached=whole, dispatch=used
        )
        result = simulate_plan(file, load_trace(trace), drawn, classes=classes)
    if json:
        print_json(result)
        return
    end_to_end = result.end_to_end_s
    title = f"{result.requests} requests, end to end p50 {seconds(end_to_end.p50)}, p95 {seconds(end_to_end.p95)}"
    columns = ("tier", "requests", "TTFT p50", "p95", "TPOT p50", "p95", "latency p95", "tokens/s", "busy")
    table = table_of(*columns, title=title)
    for tier in result.tiers:
        times = (tier.ttft_s.p50, tier.ttft_s.p95, tier.tpot_s.p50, tier.tpot_s.p95, tier.latency_s.p95)
        figures = (f"{tier.output_tokens_per_s:,.0f}", f"{tier.utilisation:.0%}")
        table.add_row(tier.name, str(tier.requests), *map(seconds, times), *figures)
    console.print(table)
    print_line(plan_report.felt_line(result.user_latency_s))
    if result.cached_share > 0:
        print_line(plan_report.cached_line(result.cached_share))
    slo_attainment.show(result.slo)
