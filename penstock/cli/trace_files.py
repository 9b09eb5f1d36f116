"""`penstock export-trace` and `penstock import-trace`: the trace file that `plan`, `simulate` and `stages` read."""

import csv
import enum
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import options, targets
from penstock.cli.output import console, fail, failing_on, needs_extra, print_json, print_line, print_written
from penstock.types.mesh_status import ServedRequest

COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
CACHED = "cached_tokens"


class Source(enum.Enum):
    """What wrote the log."""

    VLLM = "vllm"
    LITELLM = "litellm"
    OPENAI = "openai"


def export_trace(
    out: Annotated[Path, options.new_file("The trace to write, CSV.")] = Path("trace.csv"),
    admin: targets.Admin = None,
    json: targets.Json = False,
) -> None:
    """Write the last requests of a mesh as a trace: arrivals, token counts, answering tiers; no text, no tenants.

    The mesh file has to have them kept: router.kept_requests.
    """
    with targets.administration(admin) as client:
        requests = targets.all_pages(client.served_requests)
    if not requests:
        fail("the mesh has kept no requests yet")
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    rows = [(each.arrival_s - first_s, *_token_counts(each), each.tier) for each in requests]
    _write(out, (*COLUMNS, CACHED, "tier"), rows)
    seconds = requests[-1].arrival_s - first_s
    if json:
        print_json({"requests": len(rows), "seconds": seconds, "out": str(out)})
        return
    console.print(f"{len(rows):,} requests in {seconds:,.1f} s", highlight=False)
    print_written(out)


@needs_extra("import-trace", "planner")
def import_trace(
    file: Annotated[Path, typer.Argument(help="The log; may be gzipped.")],
    source: Annotated[Source, typer.Option("--from", help="What wrote the log.")],
    out: Annotated[Path, options.new_file("The trace to write, CSV.")] = Path("trace.csv"),
    json: targets.Json = False,
) -> None:
    """Convert a log of vLLM, LiteLLM or OpenAI to a trace: arrivals and token counts. Needs no mesh."""
    from penstock.planner_service.trace_importers.litellm import from_litellm
    from penstock.planner_service.trace_importers.openai import from_openai
    from penstock.planner_service.trace_importers.vllm import from_vllm
    from penstock.question_files.errors import FileError

    read = {Source.VLLM: from_vllm, Source.LITELLM: from_litellm, Source.OPENAI: from_openai}[source]
    with failing_on(FileError, status=2):
        imported = read(file)
    work = imported.requests
    columns = [work.input_tokens.tolist(), work.output_tokens.tolist()]
    share = float(work.cached_tokens.sum() / work.input_tokens.sum())
    if share > 0:
        columns.append(work.cached_tokens.tolist())
    _write(out, (*COLUMNS, CACHED) if share > 0 else COLUMNS, zip(work.arrival_s.tolist(), *columns, strict=True))
    seconds = float(work.arrival_s[-1])
    if json:
        about = {"cached_share": share, "left_out": imported.left_out, "spread": imported.spread}
        print_json({"requests": len(work), "seconds": seconds, **about, "out": str(out)})
        return
    console.print(f"{len(work):,} requests in {seconds:,.1f} s", highlight=False)
    if share > 0:
        console.print(f"{share:.1%} of the prompt tokens are cached", highlight=False)
    if imported.left_out:
        print_line(f"{imported.left_out:,} entries left out: they have no prompt or no output tokens")
    if imported.spread:
        console.print(imported.spread, highlight=False)
    print_written(out)


def _token_counts(request: ServedRequest) -> tuple[int, int, int]:
    """Input, output and cached; an empty prompt or answer counts as one token, as in the planner's files."""
    input_tokens = max(1, request.prompt_tokens)
    return input_tokens, max(1, request.output_tokens), min(request.cached_prompt_tokens, input_tokens - 1)


def _write(out: Path, columns: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Write a trace. The first of each row is the arrival, in seconds since the first request."""
    with out.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows((f"{row[0]:.6f}", *row[1:]) for row in rows)
