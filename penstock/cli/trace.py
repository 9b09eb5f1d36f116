"""`penstock trace`: what happened to the last requests, as trees."""

from typing import Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from penstock.cli import options, targets
from penstock.cli.output import cli_error_handling, console, print_json
from penstock.client.sync import Client
from penstock.client.types import Span, Trace

BAR_CELLS = 24
MAX_TRACES = 100  # what GetTraces allows

# Shown beside a span, where it has them.
TELLING = (
    "penstock.tier",
    "penstock.instance_id",
    "penstock.score",
    "penstock.threshold",
    "penstock.accepted",
    "penstock.offset",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "rpc.response.status_code",
)


def trace(
    trace_id: Annotated[str | None, typer.Argument(help="A trace's id; left out, the last ones.")] = None,
    limit: Annotated[int, options.number("--limit", "-n", help="How many.", least=1, most=MAX_TRACES)] = 3,
    target: targets.Target = None,
    json: targets.Json = False,
) -> None:
    """Show the last requests as trees of spans."""
    where = targets.resolve(target)
    with cli_error_handling(where), Client(where) as client:
        found = client.traces(limit, trace_id)
    if json:
        print_json(found)
        return
    if not found:
        console.print("No traces yet.")
    for item in reversed(found):
        console.print(tree(item))


def tree(found: Trace) -> Tree:
    """A trace as a tree; bars show when in the whole a span ran."""
    known = {span.span_id for span in found.spans}
    begin = min(span.start_s for span in found.spans)
    total = max(span.start_s + span.duration_s for span in found.spans) - begin
    root = Tree(Text(f"trace {found.trace_id}  {total * 1000:.1f} ms", style="bold"))

    def grow(parent: Tree, span: Span) -> None:
        branch = parent.add(_label(span, begin, total))
        for child in found.spans:
            if child.parent_span_id == span.span_id:
                grow(branch, child)

    for span in found.spans:
        if span.parent_span_id not in known:
            grow(root, span)
    return root


def _label(span: Span, begin: float, total: float) -> Text:
    left = int((span.start_s - begin) / total * BAR_CELLS) if total else 0
    width = max(1, round(span.duration_s / total * BAR_CELLS)) if total else BAR_CELLS
    left = min(left, BAR_CELLS - 1)
    bar = (" " * left + "━" * min(width, BAR_CELLS - left)).ljust(BAR_CELLS)
    text = Text()
    text.append(bar, style="red" if span.failed else "cyan")
    text.append(f" {span.duration_s * 1000:8.1f} ms  ")
    text.append(span.service, style="magenta")
    text.append(f" {span.name.removeprefix('penstock.')}", style="bold")
    for key in TELLING:
        if key in span.attributes:
            text.append(f"  {key.rpartition('.')[2]}={_short(span.attributes[key])}", style="dim")
    for name, after_s in span.events:
        text.append(f"  {name} +{after_s * 1000:.1f} ms", style="green")
    if span.failed:
        text.append(f"  {span.status_message}", style="red")
    return text


def _short(value: str) -> str:
    try:
        return f"{float(value):g}" if "." in value else value
    except ValueError:
        return value
