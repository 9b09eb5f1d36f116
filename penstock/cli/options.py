"""Options shared by several commands: numbers with bounds, files to write. A bad value ends the command with status 2.

Files are checked before the command begins, so that no result is lost because its folder does not exist.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from penstock.cli.output import fail
from penstock.types.limits import MAX_TOKENS
from penstock.types.planning import PlanOptions
from penstock.types.ranges import Within, range_of

MAX_SEED = 2**63 - 1  # numpy's and the contract's seeds
MAX_COUNT = 1_000_000_000
MAX_RATE_PER_S = 1e6
MAX_CONCURRENCY = 10_000
MAX_DURATION_S = 86_400
MAX_DIGITS = 9  # of a number of workers
PICTURES = (".png", ".svg")  # written next to the file of --out
SHORTEST_INTERVAL_S = 0.1  # the minimum of WatchStatus
STDOUT = Path("-")

_Number = TypeVar("_Number", int, float)
_Value = TypeVar("_Value")


def number(help: str, least: float, most: float, *flags: str, above: bool = False) -> Any:
    """An option for a number from `least` (excluded if `above`) to `most`; NaN and infinities are refused.

    flags: here and below, where they are other than the name of the parameter.
    """
    metavar = f"{'>' if above else ''}{_shown(least)}..{_shown(most)}"
    return typer.Option(*flags, help=help, metavar=metavar, callback=within(Within(least, most, above)))


def tokens(help: str, least: int = 1) -> Any:
    """An option for a number of tokens."""
    return number(help, least, MAX_TOKENS)


def count(help: str, *flags: str) -> Any:
    """An option for a number of requests, GPUs or the like."""
    return number(help, 1, MAX_COUNT, *flags)


def rate(help: str) -> Any:
    """An option for a rate per second."""
    return number(help, 0, MAX_RATE_PER_S, above=True)


def new_file(help: str) -> Any:
    """An option for a file to write. Its folder must exist."""
    return typer.Option(help=help, callback=writable)


def new_file_or_stdout(help: str) -> Any:
    """As new_file; STDOUT means standard output."""
    return typer.Option(help=help, callback=lambda path: path if path == STDOUT else writable(path))


def require_out(flag: str, out: Path | None) -> None:
    """End the command if `flag` needs a file of --out and there is none, or if it would overwrite that file."""
    if out is None or out == STDOUT:
        fail(f"{flag}: needs --out; the files are written next to it", 2)
    if out.suffix in PICTURES:
        other = out.with_suffix(".json")
        fail(f"--out: {out} would be overwritten by a plot of {flag}; use another name, such as {other}", 2)


def duration(help: str) -> Any:
    """An option for a time: `2s`, `50ms`, or seconds without a unit. Its value is in seconds."""
    return typer.Option(help=help, metavar="TIME", parser=_seconds)


def _seconds(text: str) -> float:
    number, unit = text.strip(), 1.0
    for suffix, factor in (("ms", 1e-3), ("s", 1.0), ("m", 60.0)):
        if number.endswith(suffix):
            number, unit = number.removesuffix(suffix), factor
            break
    try:
        value = float(number) * unit
    except ValueError:
        raise typer.BadParameter(f"must be a time such as 2s or 50ms, not '{text}'") from None
    if not 0 < value <= MAX_DURATION_S:
        raise typer.BadParameter(f"must be over 0 and at most {MAX_DURATION_S} s, not '{text}'")
    return value


def tier_values(flag: str, form: str, values: Sequence[str] | None, read: Callable[[str], _Value]) -> dict[str, _Value]:
    """The values of an option by tier. form: `TIER=COUNT`, for the error. read: reads one; a ValueError ends the command."""
    result = dict[str, _Value]()
    for value in values or ():
        tier, _, text = value.partition("=")
        try:
            if not tier:
                raise ValueError("no tier is named")
            result[tier] = read(text)
        except ValueError as error:
            fail(f"{flag} {value}: must be {form}: {error}", 2)
    return result


def worker_count(text: str) -> int:
    """The COUNT of TIER=COUNT. The mesh checks how many there may be."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ValueError(f"a count has 1 to {MAX_DIGITS} digits")
    return int(text)


def slo_classes(help: str) -> Any:
    """A repeatable option for a class of SLOs: NAME=TTFT,TPOT[,SHARE] or NAME=none[,SHARE]; see `parse_slo_classes`."""
    return typer.Option(help=help, metavar="NAME=TTFT,TPOT[,SHARE]")


def parse_slo_classes(flag: str, texts: Sequence[str]) -> list[tuple[str, float, float, float]]:
    """(name, time to first token, time per output token, share) of each class; infinite times for none.

    Without a share, classes have equal parts of what the others leave. A bad text ends the command with status 2.
    """
    classes: list[tuple[str, float, float, float | None]] = []
    for text in texts:
        name, _, values = text.partition("=")
        parts = [part.strip() for part in values.split(",")]
        best_effort = parts[0] == "none"
        times = 1 if best_effort else 2
        if not name.strip() or not times <= len(parts) <= times + 1 or not all(parts):
            fail(f"{flag} {text}: must be NAME=TTFT,TPOT[,SHARE], such as chat=2s,50ms,0.8, or NAME=none[,SHARE]", 2)
        try:
            ttft_s, tpot_s = (math.inf, math.inf) if best_effort else (_seconds(parts[0]), _seconds(parts[1]))
            share = float(parts[times]) if len(parts) > times else None
        except (typer.BadParameter, ValueError) as error:
            fail(f"{flag} {text}: {error}", 2)
        classes.append((name.strip(), ttft_s, tpot_s, share))
    given = sum(share for *_, share in classes if share is not None)
    open_classes = sum(share is None for *_, share in classes)
    rest = (1 - given) / open_classes if open_classes else 0.0
    return [(name, ttft_s, tpot_s, rest if share is None else share) for name, ttft_s, tpot_s, share in classes]


def seed(help: str) -> Any:
    return number(help, 0, MAX_SEED)


def of_question(field: str, help: str) -> Any:
    """A number of a planning question, in the range that it has there."""
    return typer.Option(help=help, callback=within(range_of(PlanOptions, field)))


def within(bounds: Within) -> Callable[[_Number | None], _Number | None]:
    """A callback that checks that a number, if given, is within bounds."""

    def check(value: _Number | None) -> _Number | None:
        if value is None or bounds.holds(value):
            return value
        raise typer.BadParameter(f"must be {bounds}, not {value}")

    return check


def writable(path: Path | None) -> Path | None:
    if path is None:
        return None
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


TraceRate = Annotated[float | None, rate("Requests per second; default: the rate of the trace.")]
ReplayedRequests = Annotated[
    int | None, count("Number of requests to replay; default: 2000, or all of a shorter trace.")
]
TRACE_COLUMNS = "CSV file, may be gzipped: arrival_s, input_tokens, output_tokens; optionally cached_tokens."
SelectionSeed = Annotated[int, seed("Seed of the selection of requests and prompts.")]
