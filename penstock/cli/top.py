"""`penstock status` and `penstock top`: show the state of the mesh."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Annotated, Literal, TypeVar

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
_Row = TypeVar("_Row")
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
    count: Annotated[int | None, options.count("Number of updates; default: no end.", "--count", "-n")] = None,
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
    return _table(
        tiers,
        ("tier", lambda t: t.name),
        _wide() and ("model", lambda t: t.model),
        ("threshold", lambda t: "-" if t.threshold is None else f"{t.threshold:g}"),
        ("workers", _workers),
        ("running", lambda t: f"{t.running}"),
        ("queued", lambda t: f"{t.queued}"),
        ("tokens/s", lambda t: f"{t.output_tokens_per_s:.0f}"),
        ("answered", lambda t: f"{t.answered}"),
        ("escalated", lambda t: f"{t.escalated}"),
        ("rate", lambda t: _percent(t.escalated, t.answered + t.escalated)),
        drafted and ("drafted", _drafted),
    )


def _workers(tier: TierStatus) -> str:
    workers = f"{tier.live_instances}/{tier.planned_instances}"
    return workers if tier.live_instances >= tier.planned_instances else f"[red]{workers}[/]"


def _percent(part: int, of: int) -> str:
    return f"{100 * part / of:.0f} %" if of else "-"


def _drafted(tier: TierStatus) -> str:
    """How many of the draft tokens that the tier verified were accepted."""
    verified = tier.accepted_draft_tokens + tier.rejected_draft_tokens
    return f"{tier.accepted_draft_tokens}/{verified}" if verified else "-"


def _instances(instances: Instances) -> Table:
    drafting = any(i.drafting is not None for i in instances)
    return _table(
        sorted(instances, key=lambda i: (i.role != "worker", i.role, i.tier, i.instance_id)),
        ("instance", lambda i: f"{i.instance_id} ({i.processes} processes)" if i.processes > 1 else i.instance_id),
        _wide() and ("tier", lambda i: i.tier or "-"),
        _wide() and ("address", lambda i: i.address),
        not {i.shape for i in instances} <= {"", ONE_GPU} and ("shape", lambda i: i.shape or "-"),
        any(i.place is not None for i in instances) and ("lengths", _lengths),
        ("state", _state),
        ("running", lambda i: f"{i.running}" if i.role == "worker" else "-"),
        ("queued", lambda i: f"{i.queued}" if i.role == "worker" else "-"),
        ("KV", lambda i: _percent(i.kv_blocks - i.free_kv_blocks, i.kv_blocks)),
        ("tokens/s", lambda i: f"{i.output_tokens_per_s:.0f}" if i.role == "worker" else "-"),
        drafting and ("drafted by", lambda i: _drafting(i)[0]),
        drafting and ("accepted", lambda i: _drafting(i)[1]),
        ("age", lambda i: f"{i.age_s:.1f} s"),
    )


def _state(instance: InstanceStatus) -> str:
    style = {"ready": "green", "draining": "yellow", "ejected": "red", "loading": "yellow"}.get(instance.state, "red")
    more = f" {instance.loading}" if instance.loading is not None else ", leads" if instance.leads else ""
    return f"[{style}]{instance.state}{more}[/]"


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
    """The load of each stage."""
    stages: dict[tuple[str, int], list[InstanceStatus]] = {}
    for i in mesh.instances:
        if i.place is not None:
            stages.setdefault((i.tier, i.place.stage), []).append(i)
    return _table(
        sorted(stages.items()),
        ("tier", lambda stage: stage[0][0]),
        ("stage", lambda stage: f"{stage[0][1] + 1}"),
        ("from", lambda stage: f"{min(i.place.from_tokens for i in stage[1] if i.place is not None)}"),
        ("to", lambda stage: _ends(stage[1])),
        ("workers", lambda stage: f"{len(stage[1])}"),
        ("running", lambda stage: f"{sum(i.running for i in stage[1])}"),
        ("queued", lambda stage: f"{sum(i.queued for i in stage[1])}"),
        ("tokens/s", lambda stage: f"{sum(i.output_tokens_per_s for i in stage[1]):.0f}"),
    )


def _ends(instances: Sequence[InstanceStatus]) -> str:
    """Instances have boundaries of their own, so a stage may end at several lengths."""
    ends = sorted({i.place.to_tokens - 1 for i in instances if i.place is not None})
    return f"{ends[0]}" if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def _wide() -> bool:
    """Whether there is room for optional columns."""
    return console.width >= 110


def _table(rows: Iterable[_Row], *columns: tuple[str, Callable[[_Row], str]] | Literal[False]) -> Table:
    """A table with text to the left, numbers to the right, and no wrapping. columns: name and cells; False: left out."""
    shown = [column for column in columns if column]
    table = Table(expand=True, box=None, header_style="bold cyan")
    for name, _ in shown:
        words = name in ("tier", "model", "instance", "address", "state")
        table.add_column(name, justify="left" if words else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in shown))
    return table
