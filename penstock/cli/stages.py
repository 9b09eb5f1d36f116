"""`penstock stages`: lay instances out as length stages for a trace. Needs no mesh, but can publish to one."""

import dataclasses
import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from penstock.cli import options, targets
from penstock.cli.extras import needs_extra
from penstock.cli.output import cli_error_handling, console, fail, print_json
from penstock.cli.planning import told_faults
from penstock.client.sync import PlannerClient
from penstock.client.types import Plan, Stage

if TYPE_CHECKING:
    from planner_service.stages import LengthSample, StagePlan

MAX_BANDWIDTH_GB_PER_S = 1e6


@needs_extra("stages", "planner")
def stages(
    instances: Annotated[
        int,
        options.number("--instances", help="Instances of one model to lay out.", least=1, most=options.MAX_INSTANCES),
    ],
    trace: Annotated[Path, typer.Option("--trace", help="CSV: arrival_s, input_tokens, output_tokens; gzip too.")],
    profile: Annotated[
        Path | None, typer.Option("--profile", help="A profile of `penstock profile`; else --model on --gpu.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="Of the catalogue, where no profile is given.")
    ] = "llama-3.2-3b",
    gpu: Annotated[str, typer.Option("--gpu", help="Of the catalogue, where no profile is given.")] = "h20",
    rate: Annotated[
        float | None,
        options.number(
            "--rate", help="Requests per second; else the trace's.", least=0, most=options.MAX_RATE_PER_S, above=True
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        options.number(
            "--max-tokens",
            help="Where the last stage ends; else at the longest request.",
            least=1,
            most=options.MAX_TOKENS,
        ),
    ] = None,
    bandwidth: Annotated[
        float,
        options.number("--bandwidth", help="GB/s between instances.", least=0, most=MAX_BANDWIDTH_GB_PER_S, above=True),
    ] = 25.0,
    method: Annotated[str, typer.Option("--method", help="auto, exact or heuristic.")] = "auto",
    min_gain: Annotated[
        float, options.number("--min-gain", help="Keep one stage unless QoE falls by this share.", least=0, most=1)
    ] = 0.0,
    out: Annotated[Path | None, options.new_file("--out", help="Write the layout to this JSON file.")] = None,
    plot: Annotated[
        bool,
        typer.Option("--plot/--no-plot", help="Draw the lengths with the cuts: PNG and SVG beside the file of --out."),
    ] = False,
    apply: Annotated[
        str | None,
        typer.Option("--apply", metavar="TIER", help="Publish the layout for this tier of the running mesh."),
    ] = None,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """Split instances into stages by sequence length, for the least total QoE (CascadeInfer)."""
    import numpy as np

    from planner_service.files import read_replica, read_trace
    from planner_service.simulator import Workload
    from planner_service.stages import Method, MoveCost, count_in_flight, in_flight, plan_stages

    if plot:
        options.require_out("--plot", out)
    if method not in (methods := [m.value for m in Method]):
        fail(f"--method must be {', '.join(methods)}, not {method}", 2)
    with told_faults():
        work = read_trace(trace)
        if rate is not None:
            if not 0 < work.rate_per_s < np.inf:
                fail(f"--rate: {trace} has one arrival time only, which no rate can stretch", 2)
            work = Workload(work.arrival_s * work.rate_per_s / rate, work.input_tokens, work.output_tokens)
        most = max_tokens if max_tokens is not None else work.longest_tokens + 1
        if most <= work.longest_tokens:
            fail(f"--max-tokens must exceed the trace's longest request, {work.longest_tokens} tokens", 2)
        measured = read_replica(profile, model, gpu, work)
        count = count_in_flight(work, measured.qoe, instances, measured.replica)
        sample = in_flight(work, count)
        move = MoveCost(measured.kv_bytes_per_token, bandwidth * 1e9)
        plan_stages(sample, measured.qoe, 1, most, move)  # compiles, on the first call of all
        began = time.perf_counter()
        found = plan_stages(sample, measured.qoe, instances, most, move, Method(method), min_gain)
        took = time.perf_counter() - began
        figures = plan_json(found, took)
        written = []
        if out is not None:
            out.write_text(json_module.dumps(figures, indent=1) + "\n")
            written = [out, *(draw(found, sample, out) if plot else [])]
    if apply is not None:
        stages = tuple(Stage(s.from_tokens, s.to_tokens, s.instances) for s in found.layout.stages)
        figures["revision"] = _publish(apply, stages, measured.qoe.coefficients, target).revision
    if json:
        print_json(figures)
        return
    table = Table(title=f"{instances} instances in {len(found.layout.stages)} stages, {count} sequences in flight")
    for column in ("stage", "from", "to", "instances", "sequences", "tokens each"):
        table.add_column(column, justify="right")
    for i, stage in enumerate(found.layout.stages):
        held = sample.tokens[(sample.tokens >= stage.from_tokens) & (sample.tokens < stage.to_tokens)]
        share = f"{held.sum() / stage.instances:,.0f}"
        span = (f"{stage.from_tokens:,}", f"{stage.to_tokens:,}")
        table.add_row(str(i + 1), *span, str(stage.instances), f"{len(held):,}", share)
    console.print(table)
    if found.gap is None:
        proof = "heuristic: too many instances for the exact answer"
    elif found.gap == 0:
        proof = "exact on its cut points"
    elif found.method.value == "exact":
        proof = f"one stage, {found.gap:.1%} above the exact answer: that gains less than --min-gain"
    else:
        proof = f"heuristic, {found.gap:.1%} above the exact answer"
    chain = "no chain: more instances than ranges" if found.chain_quality is None else _against(found, "chain")
    lines = [
        f"QoE {found.quality:.4g} s/token over all sequences: {_against(found, 'one_stage')}, {chain}",
        f"{proof}; {1000 * took:.1f} ms; {measured.source}",
        *([f"written: {', '.join(map(str, written))}"] if written else []),
    ]
    if apply is not None:
        lines.append(f"published for {apply}, in revision {figures['revision']} of the plan")
    console.print("\n".join(lines), highlight=False)


def _publish(tier: str, stages: tuple[Stage, ...], qoe: tuple[float, ...], target: str | None) -> Plan:
    """The plan that holds, with these stages for a tier."""
    where = targets.resolve(target)
    with cli_error_handling(where), PlannerClient(targets.planner(where)) as planner:
        current = planner.get_plan()
        planned = next((t for t in current.tiers if t.name == tier), None)
        if planned is None:
            fail(f"--apply: no tier {tier}, the mesh has {', '.join(t.name for t in current.tiers)}", 2)
        if planned.instances != (wanted := sum(stage.instances for stage in stages)):
            fail(f"--instances: the plan has {planned.instances} of {tier}, not {wanted}", 2)
        tiers = tuple(dataclasses.replace(t, stages=stages, qoe=qoe) if t is planned else t for t in current.tiers)
        made = dataclasses.replace(current, tiers=tiers, source="stages", note="")
        return planner.set_plan(made, expected_revision=current.revision)


def plan_json(plan: "StagePlan", took_s: float) -> dict[str, Any]:
    """Qualities in seconds per output token, summed over the sequences; the less the better."""
    return {
        "stages": [
            {"from_tokens": s.from_tokens, "to_tokens": s.to_tokens, "instances": s.instances}
            for s in plan.layout.stages
        ],
        "quality": plan.quality,
        "one_stage_quality": plan.one_stage_quality,
        "chain_quality": plan.chain_quality,
        "method": plan.method.value,
        "gap": plan.gap,
        "seconds": took_s,
    }


def _against(plan: "StagePlan", other: str) -> str:
    value = getattr(plan, f"{other}_quality")
    return f"{plan.quality / value - 1:+.1%} against {'one stage' if other == 'one_stage' else 'a chain'}"


def draw(plan: "StagePlan", sample: "LengthSample", out: Path) -> list[Path]:
    """The lengths in flight as a histogram, each stage its colour, cuts marked; PNG and SVG beside the JSON."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np

    colours = ("#1f6f78", "#e07a3f", "#8d99ae", "#c9a227", "#6d597a")
    least = max(1, int(sample.tokens[0]))
    even = np.geomspace(least, max(plan.layout.max_tokens, least + 1), 61)
    bins = np.union1d(even, [cut for cut in plan.layout.cuts if cut > least])  # no bar across a cut
    figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
    heights = [0.0]
    for i, stage in enumerate(plan.layout.stages):
        held = sample.tokens[(sample.tokens >= stage.from_tokens) & (sample.tokens < stage.to_tokens)]
        counts, _, _ = axes.hist(held, bins, color=colours[i % len(colours)])
        heights.append(float(np.max(counts)))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(bins[0], bins[-1])
    top = 1.25 * max(heights)
    axes.set_ylim(0, top)
    for i, stage in enumerate(plan.layout.stages):
        low, high = max(stage.from_tokens, bins[0]), min(stage.to_tokens, bins[-1])
        if high <= low:
            continue
        if stage.from_tokens > bins[0]:
            axes.axvline(stage.from_tokens, color="#333333", linewidth=0.8, linestyle="--")
        place = (np.sqrt(low * high), top * (0.98 if i % 2 == 0 else 0.92))  # narrow neighbours share no line
        axes.text(*place, f"{stage.instances}", ha="center", va="top", fontsize=9, color=colours[i % len(colours)])
    axes.set_xlabel("length of sequences in flight (tokens); dashed: cuts; above: instances of the stage")
    axes.set_ylabel("sequences")
    axes.set_title(f"{plan.layout.instances} instances, {len(plan.layout.stages)} stages", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    written = [out.with_suffix(suffix) for suffix in options.PICTURES]
    for path in written:
        figure.savefig(path, dpi=120)
    plt.close(figure)
    return written
