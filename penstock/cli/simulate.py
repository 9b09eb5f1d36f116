"""`penstock simulate`: replay a trace under a plan, without a mesh."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from penstock.cli import options, plan_report, slo_attainment, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import console, fail, print_json, seconds
from penstock.cli.planner_errors import planner_error_handling


@needs_extra("simulate", "planner")
def simulate(
    plan: Annotated[Path, typer.Option("--plan", help="A plan file of `penstock plan`.")],
    trace: Annotated[Path, typer.Option("--trace", help=options.TRACE_COLUMNS)],
    requests: options.ReplayedRequests = None,
    seed: options.SelectionSeed = 1,
    lengths: options.Lengths = "quality",
    rate: options.TraceRate = None,
    ignore_cached: options.PlansIgnoreCached = None,
    dispatch: Annotated[
        str | None,
        typer.Option(
            "--dispatch",
            help="How requests are distributed over replicas: capacity, round-robin, or pending-work, as routers do. "
            "Default: as planned. The attainment of --slo has its own placement.",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        options.slo_classes("--slo", help="A class of requests with SLOs: their attainment is reported. Repeatable."),
    ] = None,
    burst_window: Annotated[
        float,
        options.number(
            "--burst-window",
            help="Seconds over which the mean quality of a burst ladder holds, as router.burst_window_s.",
            least=10,
            most=86_400,
        ),
    ] = 600.0,
    json: targets.Json = False,
) -> None:
    """Replay a trace under a plan in virtual time, with the batch scheduler of the workers.

    Where the plan has a burst ladder, thresholds give way as routers let them.
    """
    from planner_service.burst_simulation import simulate_bursts
    from planner_service.cascade_plan import Felt
    from planner_service.cascade_simulation import run_cascade
    from planner_service.demand import demand_of
    from planner_service.files import read_quality, read_trace
    from planner_service.plan_file import felt_json, read_plan, read_planned_site, report_json, strategies_of
    from planner_service.simulator import Dispatch

    options.check_choice("--dispatch", dispatch, Dispatch)
    with planner_error_handling():
        classes = slo_attainment.read_classes(slo or [])
        planned = read_plan(plan)
        if any(planned.long_answers) and lengths == "trace":
            fail(options.LENGTHS_OF_ANSWERS, 2)
        site = read_planned_site(planned)
        judged, arrivals = read_quality(Path(planned.inputs.quality), site.tiers), read_trace(trace)
        if planned.inputs.ignore_cached if ignore_cached is None else ignore_cached:
            arrivals = arrivals.uncached()
        count = requests or min(options.DEFAULT_REPLAY, len(arrivals))
        demand = demand_of(arrivals, judged, requests=count, seed=seed, lengths=lengths, rate=rate)
        demand = demand.under(planned.rules)
        how = planned.dispatch if dispatch is None else Dispatch(dispatch)
        strategies = strategies_of(planned.shapes, site)
        bursts: dict[str, Any] | None = None
        if planned.burst is None:
            cascade = run_cascade(site, demand, planned.thresholds, strategies, how)
        else:
            run = simulate_bursts(site, demand, planned.burst, strategies, how, window_s=burst_window, seed=seed)
            cascade = run.cascade
            bursts = {
                "steps": [int((run.steps == i).sum()) for i in range(len(planned.burst.steps))],
                "changes": run.changes,
                "quality": float(run.scores.mean()),
            }
        attainments = slo_attainment.simulate(site, demand, planned.thresholds, strategies, classes, seed)
    felt, reports = Felt.of(cascade), cascade.reports
    spread = felt_json(felt)
    figures = {
        "requests": len(cascade.total_s),
        "cached_share": demand.cached_share,
        "end_to_end_s": spread["end_to_end"],
        "user_latency_s": spread,
        "tiers": [{"name": name, **report_json(report)} for name, report in zip(site.tiers, reports, strict=True)],
    }
    if attainments:
        figures["slo"] = slo_attainment.classes_json(classes, attainments)
    if bursts is not None:
        figures["burst"] = bursts
    if json:
        print_json(figures)
        return
    table = Table(
        title=f"{len(cascade.total_s)} requests, end to end p50 {seconds(felt.end_to_end.p50)}, "
        f"p95 {seconds(felt.end_to_end.p95)}"
    )
    for column in ("tier", "requests", "TTFT p50", "p95", "TPOT p50", "p95", "latency p95", "tokens/s", "busy"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for name, report in zip(site.tiers, reports, strict=True):
        times = (report.ttft.p50, report.ttft.p95, report.tpot.p50, report.tpot.p95, report.latency.p95)
        table.add_row(
            name,
            str(report.requests),
            *map(seconds, times),
            f"{report.output_tokens_per_s:,.0f}",
            f"{report.utilisation:.0%}",
        )
    console.print(table)
    console.print(plan_report.felt_line(felt), highlight=False, soft_wrap=True)
    if demand.cached_share > 0:
        console.print(plan_report.cached_line(demand.cached_share), highlight=False, soft_wrap=True)
    if bursts is not None:
        shares = ", ".join(f"{i}: {count}" for i, count in enumerate(bursts["steps"]))
        console.print(
            f"burst ladder, requests by step: {shares}; {bursts['changes']} changes, quality {bursts['quality']:.2f}",
            highlight=False,
            soft_wrap=True,
        )
    slo_attainment.show(attainments)
