"""`penstock stages`: assign instances to length stages for a trace. Works without a mesh; can publish to one."""

import dataclasses
import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options, targets
from penstock.cli.output import console, fail, needs_extra, planner_error_handling, print_json, table_of
from penstock.cli.plan_plots import panels_of, write_pictures
from penstock.types.plans import MAX_INSTANCES, Plan, QoeModel, Stage, TierPlan

if TYPE_CHECKING:
    from penstock.planner_service.stages.partition import StagePlan
    from penstock.planner_service.stages.replay import ReplayVerdict
    from penstock.planner_service.stages.sample import LengthSample

MAX_BANDWIDTH_GB_PER_S = 1e6
MEASURED_BANDWIDTH_GB_PER_S = 0.63
"""What moves between two workers on one host carried over gRPC (`python -m benchmarks migration`, 2 cores)."""


@needs_extra("stages", "planner")
def stages(
    instances: Annotated[int, options.number("Instances of one model.", 1, MAX_INSTANCES)],
    trace: Annotated[Path, typer.Option(help=options.TRACE_COLUMNS)],
    profile: Annotated[
        Path | None, typer.Option(help="A profile of `penstock profile`; default: --model on --gpu.")
    ] = None,
    model: Annotated[str, typer.Option(help="From the catalogue, if no profile is given.")] = "llama-3.2-3b",
    gpu: Annotated[str, typer.Option(help="From the catalogue, if no profile is given.")] = "h20",
    rate: options.TraceRate = None,
    max_tokens: Annotated[int | None, options.tokens("End of the last stage; default: the longest request.")] = None,
    bandwidth: Annotated[
        float,
        options.number(
            "Bandwidth of KV between instances, in GB/s; default: what gRPC carried between two workers of one host.",
            0,
            MAX_BANDWIDTH_GB_PER_S,
            above=True,
        ),
    ] = MEASURED_BANDWIDTH_GB_PER_S,
    replay: Annotated[
        bool, typer.Option(help="Replay the best layouts against one stage, and keep one stage unless they help.")
    ] = True,
    out: Annotated[Path | None, options.new_file("Write the layout to this JSON file.")] = None,
    plot: Annotated[
        bool, typer.Option(help="Plot the lengths with the cuts, as PNG and SVG next to the file of --out.")
    ] = False,
    apply: Annotated[
        str | None,
        typer.Option(
            metavar="TIER",
            help="Publish the layout for this tier of the running mesh; refused if the replay does not favour it.",
        ),
    ] = None,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Split instances into stages by sequence length (CascadeInfer), if that helps: layouts are replayed on the trace."""
    from penstock.planner_service.api.stages import at_rate, staged
    from penstock.planner_service.files.measured import read_trace
    from penstock.planner_service.files.stage_replica import read_replica
    from penstock.planner_service.simulator.cluster import Moves

    if apply is not None and not replay:
        fail("--apply: only layouts that a replay favours are published; leave out --no-replay", 2)
    if apply is not None:
        with targets.planner(admin) as planner:
            _tier_of(planner.get_plan(), apply, instances)  # before the replay, which takes a while
    if plot:
        options.require_out("--plot", out)
    with planner_error_handling():
        work = at_rate(read_trace(trace), rate)
        max_length = max_tokens if max_tokens is not None else work.longest_tokens + 1
        if max_length <= work.longest_tokens:
            fail(f"--max-tokens must exceed the trace's longest request, {work.longest_tokens} tokens", 2)
        measured = read_replica(profile, model, gpu, work)
        moves, replayer = Moves(measured.kv_bytes_per_token, bandwidth * 1e9), (work, measured.replica)
        result = staged(instances, max_length, moves, qoe=measured.qoe, trace=replayer, replayed=replay)
        planned, sample, verdict, took_s = result.plan, result.sample, result.verdict, result.took_s
        figures = plan_json(planned, took_s) | {"verdict": None if verdict is None else verdict_json(verdict)}
        written = []
        if out is not None:
            out.write_text(json_module.dumps(figures, indent=1) + "\n")
            written = [out, *(draw(planned, sample, out) if plot else [])]
    if apply is not None and verdict is not None:
        if not verdict.use_stages:
            fail(f"--apply: not published. {verdict.sentence}")
        figures["revision"] = _publish(apply, planned.layout.stages, measured.qoe, admin).revision
    if json:
        print_json(figures)
        return
    how_many = f"{len(planned.layout.stages)} stages, {len(sample.tokens)} sequences in flight"
    columns = ("stage", "from", "to", "instances", "sequences", "tokens each")
    table = table_of(*columns, words=0, title=f"{instances} instances in {how_many}")
    for i, stage in enumerate(planned.layout.stages):
        lengths = sample.tokens[(sample.tokens >= stage.from_tokens) & (sample.tokens < stage.to_tokens)]
        share = f"{lengths.sum() / stage.instances:,.0f}"
        span = (f"{stage.from_tokens:,}", f"{stage.to_tokens:,}")
        table.add_row(str(i + 1), *span, str(stage.instances), f"{len(lengths):,}", share)
    console.print(table)
    proof = "exact for its cut points"
    if planned.gap:
        proof = f"{planned.gap:.1%} above the least QoE, which does not know queues: the replay decides"
    against_one = planned.quality / planned.one_stage_quality - 1
    lines = [
        *([verdict.sentence] if verdict is not None else ["Not replayed: whether these stages help is not known."]),
        f"QoE {planned.quality:.4g} s/token over all sequences: {against_one:+.1%} against one stage",
        f"{proof}; {1000 * took_s:.1f} ms; {measured.source}",
        *([f"written: {', '.join(map(str, written))}"] if written else []),
    ]
    if apply is not None:
        lines.append(f"published for {apply}, in revision {figures['revision']} of the plan")
    console.print("\n".join(lines), highlight=False)


def _tier_of(plan: Plan, tier: str, instances: int) -> TierPlan:
    """Ends the command if a plan has no such tier or another number of its instances."""
    planned = next((t for t in plan.tiers if t.name == tier), None)
    if planned is None:
        fail(f"--apply: no tier {tier}, the mesh has {', '.join(t.name for t in plan.tiers)}", 2)
    if planned.instances != instances:
        fail(f"--instances: the plan has {planned.instances} of {tier}, not {instances}", 2)
    return planned


def _publish(tier: str, stages: tuple[Stage, ...], qoe: QoeModel, admin: str | None) -> Plan:
    """Publish the current plan with these stages for a tier."""
    with targets.planner(admin) as planner:
        current = planner.get_plan()
        planned = _tier_of(current, tier, sum(stage.instances for stage in stages))
        tiers = tuple(dataclasses.replace(t, stages=stages, qoe=qoe) if t is planned else t for t in current.tiers)
        changed = dataclasses.replace(current, tiers=tiers, source="stages", note="")
        return planner.set_plan(changed, expected_revision=current.revision)


def plan_json(plan: "StagePlan", took_s: float) -> dict[str, Any]:
    """The layout as JSON. Qualities are in seconds per output token, summed over the sequences; lower is better."""
    return {
        "stages": [dataclasses.asdict(stage) for stage in plan.layout.stages],
        "quality": plan.quality,
        "one_stage_quality": plan.one_stage_quality,
        "method": "exact",
        "gap": plan.gap,
        "seconds": took_s,
    }


def verdict_json(verdict: "ReplayVerdict") -> dict[str, Any]:
    """The verdict as JSON: changes against one stage as shares, negative is less. `stages`: the layout that was judged.

    before: the same changes on the requests before; null where they were not replayed.
    """
    layout, before = verdict.layout, verdict.before
    return {
        "use_stages": verdict.use_stages,
        **verdict.changes._asdict(),
        "before": None if before is None else before._asdict(),
        "sentence": verdict.sentence,
        "replayed": verdict.replayed,
        "stages": [] if layout is None else [dataclasses.asdict(stage) for stage in layout.stages],
    }


def draw(plan: "StagePlan", sample: "LengthSample", out: Path) -> list[Path]:
    """Plot a histogram of the lengths in flight, coloured by stage, with the cuts, as PNG and SVG next to the JSON file."""
    import numpy as np

    colours = ("#1f6f78", "#e07a3f", "#8d99ae", "#c9a227", "#6d597a")
    shortest = max(1, int(sample.tokens[0]))
    even = np.geomspace(shortest, max(plan.layout.max_tokens, shortest + 1), 61)
    bins = np.union1d(even, [cut for cut in plan.layout.cuts if cut > shortest])  # cuts are bin edges
    title = f"{plan.layout.instances} instances, {len(plan.layout.stages)} stages"
    figure, (axes,) = panels_of(title, 1, (9, 4.4))
    heights = [0.0]
    for i, stage in enumerate(plan.layout.stages):
        lengths = sample.tokens[(sample.tokens >= stage.from_tokens) & (sample.tokens < stage.to_tokens)]
        counts, _, _ = axes.hist(lengths, bins, color=colours[i % len(colours)])
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
        # alternating heights: labels of narrow stages do not overlap
        middle, height, colour = np.sqrt(low * high), top * (0.98 if i % 2 == 0 else 0.92), colours[i % len(colours)]
        axes.text(middle, height, f"{stage.instances}", ha="center", va="top", fontsize=9, color=colour)
    axes.set_xlabel("length of sequences in flight (tokens); dashed: cuts; above: instances of the stage")
    axes.set_ylabel("sequences")
    return write_pictures(figure, out)
