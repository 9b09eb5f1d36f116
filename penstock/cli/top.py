"""`penstock status` and `penstock top`: the mesh at a glance."""

import time
from collections import deque
from typing import Annotated

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.cli import options, targets
from penstock.cli.output import cli_error_handling, console, print_json, seconds
from penstock.client.sync import Client
from penstock.client.types import InstanceStatus, MeshStatus, TierStatus

BARS = " ▁▂▃▄▅▆▇█"
HISTORY = 60
MAX_INTERVAL_S = 86_400.0


def status(target: targets.Target = None, json: targets.Json = False) -> None:
    """The mesh as it is now."""
    where = targets.resolve(target)
    with cli_error_handling(where), Client(where) as client:
        found = client.status()
    if json:
        print_json(found)
    else:
        console.print(screen(found, deque()))


def top(
    interval: Annotated[
        float,
        options.number(
            "--interval",
            "-i",
            help="Seconds between two looks.",
            least=options.SHORTEST_INTERVAL_S,
            most=MAX_INTERVAL_S,
        ),
    ] = 1.0,
    count: Annotated[
        int | None, options.number("--count", "-n", help="End after so many looks.", least=1, most=options.MAX_COUNT)
    ] = None,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """The mesh, live: tiers, instances, queue, tokens per second, escalation rate. Ctrl-C ends it.

    With --json a line per look.
    """
    where = targets.resolve(target)
    history: deque[float] = deque(maxlen=HISTORY)
    looks = 0
    with cli_error_handling(where), Client(where) as client:
        try:
            with Live(console=console, screen=not json and console.is_terminal, auto_refresh=False) as live:
                for found in client.watch_status(interval):
                    history.append(sum(t.output_tokens_per_s for t in found.tiers))
                    if json:
                        print_json({"time": time.time(), "status": found}, indent=None)
                    else:
                        live.update(screen(found, history), refresh=True)
                    looks += 1
                    if count is not None and looks >= count:
                        return
        except KeyboardInterrupt:
            return


def screen(found: MeshStatus, history: deque[float]) -> Group:
    """The whole screen."""
    parts: list[Table | Panel | Text] = [_head(found), _tiers(found.tiers), _instances(found.instances)]
    if any(i.place is not None for i in found.instances):
        parts.insert(2, _stages(found))
    if len(history) > 1:
        peak = max(*history, 1e-9)
        line = "".join(BARS[round(value / peak * (len(BARS) - 1))] for value in history)
        parts.append(Text(f"tokens/s  {line}  now {history[-1]:.0f}, peak {peak:.0f}", style="cyan"))
    return Group(*parts)


def _head(found: MeshStatus) -> Panel:
    state = "connected" if found.connected else f"Redis away for {found.state_age_s:.0f} s: serving on the last picture"
    finished = max(found.finished, 1)
    escalated = sum(t.escalated for t in found.tiers)
    text = Text.assemble(
        ("plan ", "dim"), f"{found.plan_revision}  ",
        *((("processes ", "dim"), _answering(found)) if found.processes else ()),
        ("state ", "dim"), (f"{state}  ", "green" if found.connected else "red"),
        ("active ", "dim"), f"{found.active}  ",
        ("waiting ", "dim"), f"{found.waiting}  ",
        ("requests/s ", "dim"), f"{found.requests_per_s:.1f}  ",
        ("first token p50/p95 ", "dim"), f"{seconds(found.ttft_p50_s)} / {seconds(found.ttft_p95_s)}\n",
        ("finished ", "dim"), f"{found.finished}  ",
        ("failed ", "dim"), f"{found.failed}  ",
        ("rejected ", "dim"), f"{found.rejected}  ",
        ("failovers ", "dim"), f"{found.failovers}  ",
        ("migrations ", "dim"), f"{found.migrations}  ",
        *((("advice unmet ", "dim"), f"{found.advice_unmet}  ") if found.advice_unmet else ()),
        ("escalations per request ", "dim"), f"{escalated / finished:.2f}",
    )  # fmt: skip
    return Panel(text, title=f"penstock  {found.router_id}", title_align="left", border_style="cyan")


def _answering(found: MeshStatus) -> tuple[str, str]:
    """How many of the router's processes answer, and the style to show it in."""
    answering, count = sum(process.answering for process in found.processes), len(found.processes)
    return f"{answering}/{count}  ", "red" if answering < count else ""


def _tiers(tiers: tuple[TierStatus, ...]) -> Table:
    table = _table("tier", *(("model",) if _wide() else ()), "from", "workers", "running", "queued", "tokens/s",
                   "answered", "escalated", "rate")  # fmt: skip
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
        )
    return table


def _instances(instances: tuple[InstanceStatus, ...]) -> Table:
    staged = any(i.place is not None for i in instances)
    table = _table("instance", *(("tier", "address") if _wide() else ()), *(("lengths",) if staged else ()), "state",
                   "running", "queued", "KV", "tokens/s", "heard")  # fmt: skip
    styles = {"ready": "green", "draining": "yellow", "ejected": "red"}
    for i in sorted(instances, key=lambda i: (i.role != "worker", i.role, i.tier, i.instance_id)):
        worker = i.role == "worker"
        used = f"{100 * (1 - i.free_kv_blocks / i.kv_blocks):.0f} %" if i.kv_blocks else "-"
        table.add_row(
            f"{i.instance_id} ({i.processes} processes)" if i.processes > 1 else i.instance_id,
            *((i.tier or "-", i.address) if _wide() else ()),
            *((_lengths(i),) if staged else ()),
            f"[{styles.get(i.state, 'red')}]{i.state}[/]",
            str(i.running) if worker else "-",
            str(i.queued) if worker else "-",
            used,
            f"{i.output_tokens_per_s:.0f}" if worker else "-",
            f"{i.age_s:.1f} s",
        )
    return table


def _lengths(instance: InstanceStatus) -> str:
    """The lengths that an instance serves."""
    place = instance.place
    return f"{place.from_tokens} to {place.to_tokens - 1}" if place is not None else "-"


def _stages(found: MeshStatus) -> Table:
    """What each stage of each tier holds; the boundary is each instance's own, so a stage may end at several lengths."""
    stages: dict[tuple[str, int], list[InstanceStatus]] = {}
    for i in found.instances:
        if i.place is not None:
            stages.setdefault((i.tier, i.place.stage), []).append(i)
    table = _table("tier", "stage", "from", "to", "workers", "running", "queued", "tokens/s")
    for (tier, stage), held in sorted(stages.items()):
        places = [i.place for i in held if i.place is not None]
        ends = sorted({place.to_tokens - 1 for place in places})
        table.add_row(
            tier,
            str(stage + 1),
            str(min(place.from_tokens for place in places)),
            str(ends[0]) if len(ends) == 1 else f"{ends[0]} to {ends[-1]}",
            str(len(held)),
            str(sum(i.running for i in held)),
            str(sum(i.queued for i in held)),
            f"{sum(i.output_tokens_per_s for i in held):.0f}",
        )
    return table


def _wide() -> bool:
    """Whether there is room for what can be left out."""
    return console.width >= 110


def _table(*columns: str) -> Table:
    """Words to the left, numbers to the right, nothing wrapped."""
    table = Table(expand=True, box=None, header_style="bold cyan")
    for name in columns:
        words = name in ("tier", "model", "instance", "address", "state")
        table.add_column(name, justify="left" if words else "right", no_wrap=True, overflow="ellipsis")
    return table
