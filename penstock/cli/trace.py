"""`penstock trace`: show the traces of the last requests as trees."""

from typing import Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from penstock.cli import options, targets
from penstock.cli.output import console, print_json
from penstock.types.mesh_status import Span, Trace

BAR_CELLS = 24
MAX_TRACES = 100  # the maximum of ListTraces

# Attributes that are shown after a span.
SHOWN_ATTRIBUTES = (
    *(
        f"penstock.{name}"
        for name in ("tier", "instance_id", "score", "threshold", "accepted", "better_tier", "offset")
    ),
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "rpc.response.status_code",
)


def trace(
    trace_id: Annotated[str | None, typer.Argument(help="Id of a trace; default: the last traces.")] = None,
    limit: Annotated[int, options.number("Number of traces.", 1, MAX_TRACES, "--limit", "-n")] = 3,
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Show the traces of the last requests as trees of spans."""
    with targets.administration(admin) as client:
        traces = client.traces(limit, trace_id)
    if json:
        print_json(traces)
        return
    if not traces:
        console.print("No traces yet.")
    for item in reversed(traces):
        console.print(tree(item))


def tree(trace: Trace) -> Tree:
    """A trace as a tree. Bars show when each span ran."""
    span_ids = {span.span_id for span in trace.spans}
    begin = min(span.start_s for span in trace.spans)
    total = max(span.start_s + span.duration_s for span in trace.spans) - begin
    root = Tree(Text(f"trace {trace.trace_id}  {total * 1000:.1f} ms", style="bold"))

    def grow(parent: Tree, span: Span) -> None:
        branch = parent.add(_label(span, begin, total))
        for child in trace.spans:
            if child.parent_span_id == span.span_id:
                grow(branch, child)

    for span in trace.spans:
        if span.parent_span_id not in span_ids:
            grow(root, span)
    return root


def _label(span: Span, begin: float, total: float) -> Text:
    indent = int((span.start_s - begin) / total * BAR_CELLS) if total else 0
    width = max(1, round(span.duration_s / total * BAR_CELLS)) if total else BAR_CELLS
    indent = min(indent, BAR_CELLS - 1)
    bar = (" " * indent + "━" * min(width, BAR_CELLS - indent)).ljust(BAR_CELLS)
    text = Text()
    text.append(bar, style="red" if span.failed else "cyan")
    text.append(f" {span.duration_s * 1000:8.1f} ms  ")
    text.append(span.service, style="magenta")
    text.append(f" {span.name.removeprefix('penstock.')}", style="bold")
    for key in SHOWN_ATTRIBUTES:
        if key in span.attributes:
            text.append(f"  {key.rpartition('.')[2]}={_short(span.attributes[key])}", style="dim")
    for event in span.events:
        text.append(f"  {event.name} +{event.after_s * 1000:.1f} ms", style="green")
    if span.failed:
        text.append(f"  {span.status_message}", style="red")
    return text


def _short(value: str) -> str:
    try:
        return f"{float(value):g}" if "." in value else value
    except ValueError:
        return value
