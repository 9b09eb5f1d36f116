"""`penstock status` and `penstock top`: show the state of the mesh."""

import time
from collections import Counter, deque
from contextlib import nullcontext
from typing import Annotated

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.cli import options, targets
from penstock.cli.output import console, print_json, seconds
from penstock.types.mesh_status import InstanceState, InstanceStatus, MeshStatus, SloCounts, TierStatus

BARS = " ▁▂▃▄▅▆▇█"
HISTORY = 60
MAX_INTERVAL_S = 86_400.0
Instances = tuple[InstanceStatus, ...]
ONE_GPU = "tp1pp1"
"""The shape of workers with one GPU at most."""


def status(admin: targets.Admin = None, json: targets.Json = False) -> None:
    """Show the state of the mesh."""
    with targets.administration(admin) as client:
        mesh = client.status()
    if json:
        print_json(mesh)
    else:
        console.print(screen(mesh, deque()))


def top(
    interval: Annotated[
        float,
        options.number("Seconds between updates.", options.SHORTEST_INTERVAL_S, MAX_INTERVAL_S, "--interval", "-i"),
    ] = 1.0,
    count: Annotated[
        int | None, options.number("Number of updates; default: no end.", 1, options.MAX_COUNT, "--count", "-n")
    ] = None,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Show the state of the mesh and update it: tiers, instances, queue, tokens per second, escalation rate. End with Ctrl-C.

    With --json, prints one line per update.
    """
    history: deque[float] = deque(maxlen=HISTORY)
    updates = 0
    with targets.administration(admin) as client:
        try:
            redraws = console.is_terminal and not json
            with Live(console=console, screen=count is None, auto_refresh=False) if redraws else nullcontext() as live:
                for mesh in client.watch_status(interval):
                    history.append(sum(t.output_tokens_per_s for t in mesh.tiers))
                    if json:
                        print_json({"time": time.time(), "status": mesh}, indent=None)
                    elif live is not None:
                        live.update(screen(mesh, history, console.height), refresh=True)
                    else:
                        console.print(screen(mesh, history))
                    updates += 1
                    if count is not None and updates >= count:
                        return
        except KeyboardInterrupt:
            return


def screen(mesh: MeshStatus, history: deque[float], lines: int | None = None) -> Group:
    """The content of the screen. lines: that it has room for; of more instances, those to look at are shown."""
    before: list[Table | Panel | Text] = [_head(mesh), _tiers(mesh.tiers)]
    if any(i.place is not None for i in mesh.instances):
        before.append(_stages(mesh))
    after: list[Table | Panel | Text] = []
    if len(history) > 1:
        peak = max(*history, 1e-9)
        line = "".join(BARS[round(value / peak * (len(BARS) - 1))] for value in history)
        after.append(Text(f"tokens/s  {line}  now {history[-1]:.0f}, peak {peak:.0f}", style="cyan"))
    after += [Text(f"warning: {warning}", style="yellow") for warning in mesh.warnings]
    instances = mesh.instances
    if lines is not None:
        taken = len(console.render_lines(Group(*before, *after))) + 1  # the names of the columns
        instances, rest = notable(instances, max(1, lines - taken))
        if rest:
            states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(i.state for i in rest).items()))
            after.insert(0, Text(f"and {len(rest)} with less load: {states}", style="dim"))
    return Group(*before, _instances(instances), *after)


def notable(instances: Instances, lines: int) -> tuple[Instances, Instances]:
    """The instances for so many lines, and the others, which take one of them: first those not ready, then the busiest."""
    if len(instances) <= lines:
        return instances, ()
    order = sorted(instances, key=lambda i: (i.state == InstanceState.READY, -i.running - i.queued, i.instance_id))
    return tuple(order[: lines - 1]), tuple(order[lines - 1 :])


def _head(mesh: MeshStatus) -> Panel:
    state = (
        "connected" if mesh.connected else f"no Redis for {mesh.state_age_s:.0f} s: serving with the last known state"
    )
    finished = max(mesh.finished, 1)
    escalated = sum(t.escalated for t in mesh.tiers)
    text = Text.assemble(
        ("plan ", "dim"), f"{mesh.plan_revision}  ",
        *((("processes ", "dim"), _answering(mesh)) if mesh.processes else ()),
        ("state ", "dim"), (f"{state}  ", "green" if mesh.connected else "red"),
        ("active ", "dim"), f"{mesh.active}  ",
        ("waiting ", "dim"), f"{mesh.waiting}  ",
        ("requests/s ", "dim"), f"{mesh.requests_per_s:.1f}  ",
        ("first token p50/p95 ", "dim"), f"{seconds(mesh.ttft_p50_s)} / {seconds(mesh.ttft_p95_s)}\n",
        ("finished ", "dim"), f"{mesh.finished}  ",
        ("failed ", "dim"), f"{mesh.failed}  ",
        ("rejected ", "dim"), f"{mesh.rejected}  ",
        ("failovers ", "dim"), f"{mesh.failovers}  ",
        ("migrations ", "dim"), f"{mesh.migrations}  ",
        *((("advised moves that failed ", "dim"), f"{mesh.advice_unmet}  ") if mesh.advice_unmet else ()),
        *((("latency objectives ", "dim"), _objectives(mesh)) if mesh.slo != SloCounts() else ()),
        ("escalations per request ", "dim"), f"{escalated / finished:.2f}",
    )  # fmt: skip
    return Panel(text, title=f"penstock  {mesh.router_id}", title_align="left", border_style="cyan")


def _objectives(mesh: MeshStatus) -> str:
    """Requests with an SLO, by how they were served."""
    slo = mesh.slo
    return f"{slo.attained} met, {slo.broken} broken, {slo.best_effort} best effort, {slo.declined} declined  "


def _answering(mesh: MeshStatus) -> tuple[str, str]:
    """How many of the router's processes answer, and the style to show it in."""
    answering, count = sum(process.answering for process in mesh.processes), len(mesh.processes)
    return f"{answering}/{count}  ", "red" if answering < count else ""


def _tiers(tiers: tuple[TierStatus, ...]) -> Table:
    drafted = any(t.accepted_draft_tokens or t.rejected_draft_tokens for t in tiers)
    table = _table("tier", *(("model",) if _wide() else ()), "threshold", "workers", "running", "queued", "tokens/s",
                   "answered", "escalated", "rate", *(("drafted",) if drafted else ()))  # fmt: skip
    for t in tiers:
        worked = t.answered + t.escalated
        workers = f"{t.live_instances}/{t.planned_instances}"
        table.add_row(
            t.name,
            *((t.model,) if _wide() else ()),
            "-" if t.threshold is None else f"{t.threshold:g}",
            workers if t.live_instances >= t.planned_instances else f"[red]{workers}[/]",
            str(t.running),
            str(t.queued),
            f"{t.output_tokens_per_s:.0f}",
            str(t.answered),
            str(t.escalated),
            f"{100 * t.escalated / worked:.0f} %" if worked else "-",
            *((_drafted(t),) if drafted else ()),
        )
    return table


def _drafted(tier: TierStatus) -> str:
    """How many of the draft tokens that the tier verified were accepted."""
    verified = tier.accepted_draft_tokens + tier.rejected_draft_tokens
    return f"{tier.accepted_draft_tokens}/{verified}" if verified else "-"


def _instances(instances: tuple[InstanceStatus, ...]) -> Table:
    staged = any(i.place is not None for i in instances)
    drafting = any(i.drafting is not None for i in instances)
    shaped = not {i.shape for i in instances} <= {"", ONE_GPU}
    table = _table("instance", *(("tier", "address") if _wide() else ()), *(("shape",) if shaped else ()),
                   *(("lengths",) if staged else ()), "state",
                   "running", "queued", "KV", "tokens/s", *(("drafted by", "accepted") if drafting else ()),
                   "age")  # fmt: skip
    styles = {"ready": "green", "draining": "yellow", "ejected": "red", "loading": "yellow"}
    for i in sorted(instances, key=lambda i: (i.role != "worker", i.role, i.tier, i.instance_id)):
        worker = i.role == "worker"
        used = f"{100 * (1 - i.free_kv_blocks / i.kv_blocks):.0f} %" if i.kv_blocks else "-"
        table.add_row(
            f"{i.instance_id} ({i.processes} processes)" if i.processes > 1 else i.instance_id,
            *((i.tier or "-", i.address) if _wide() else ()),
            *((i.shape or "-",) if shaped else ()),
            *((_lengths(i),) if staged else ()),
            f"[{styles.get(i.state, 'red')}]{i.state}{_more_of_state(i)}[/]",
            str(i.running) if worker else "-",
            str(i.queued) if worker else "-",
            used,
            f"{i.output_tokens_per_s:.0f}" if worker else "-",
            *(_drafting(i) if drafting else ()),
            f"{i.age_s:.1f} s",
        )
    return table


def _more_of_state(instance: InstanceStatus) -> str:
    if instance.loading is not None:
        return f" {instance.loading}"
    return ", leads" if instance.leads else ""


def _drafting(instance: InstanceStatus) -> tuple[str, str]:
    """The models that draft there and their window, and the share of their tokens that is accepted."""
    drafting = instance.drafting
    if drafting is None:
        return "-", "-"
    chain = f"{' > '.join(drafting.chain)}, {drafting.window}" if drafting.chain else "none now"
    return chain, "-" if drafting.accepted_share is None else f"{100 * drafting.accepted_share:.0f} %"


def _lengths(instance: InstanceStatus) -> str:
    """The range of lengths that an instance serves."""
    place = instance.place
    return f"{place.from_tokens} to {place.to_tokens - 1}" if place is not None else "-"


def _stages(mesh: MeshStatus) -> Table:
    """The load of each stage. Instances have boundaries of their own, so a stage may end at several lengths."""
    stages: dict[tuple[str, int], list[InstanceStatus]] = {}
    for i in mesh.instances:
        if i.place is not None:
            stages.setdefault((i.tier, i.place.stage), []).append(i)
    table = _table("tier", "stage", "from", "to", "workers", "running", "queued", "tokens/s")
    for (tier, stage), members in sorted(stages.items()):
        places = [i.place for i in members if i.place is not None]
        ends = sorted({place.to_tokens - 1 for place in places})
        table.add_row(
            tier,
            str(stage + 1),
            str(min(place.from_tokens for place in places)),
            str(ends[0]) if len(ends) == 1 else f"{ends[0]} to {ends[-1]}",
            str(len(members)),
            str(sum(i.running for i in members)),
            str(sum(i.queued for i in members)),
            f"{sum(i.output_tokens_per_s for i in members):.0f}",
        )
    return table


def _wide() -> bool:
    """Whether there is room for optional columns."""
    return console.width >= 110


def _table(*columns: str) -> Table:
    """A table with text to the left, numbers to the right, and no wrapping."""
    table = Table(expand=True, box=None, header_style="bold cyan")
    for name in columns:
        words = name in ("tier", "model", "instance", "address", "state")
        table.add_column(name, justify="left" if words else "right", no_wrap=True, overflow="ellipsis")
    return table
