"""Logs of other servers as traces: vLLM's request log, LiteLLM's spend logs, OpenAI's usage export.

Only arrivals and token counts are taken from them. Fields that are not needed are ignored. Faults name the file, the line or
entry, and the field.
"""

import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from planner_service.files import FileError, csv_rows
from planner_service.simulator import Workload

MAX_TOKENS = 2**31 - 1  # of one request
LEAP_YEAR = 2000  # stands for the year, which vLLM does not log
MAX_BUCKET_REQUESTS = 1_000_000  # of one bucket of a usage export
EVENLY = "arrivals are known to {width} only; those of the same {width} are spread evenly over it"


@dataclass(frozen=True, slots=True)
class ImportedTrace:
    """requests: ordered by arrival, in seconds since the first. left_out: entries without prompt or output tokens.

    spread: what was assumed about arrivals that the log does not have; empty if it has them all.
    """

    requests: Workload
    left_out: int = 0
    spread: str = ""


Moment = tuple[int, ...]
"""Month, day, hour, minute and second of a line in vLLM's log."""


# vllm/logger.py: "%(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s", with "%m-%d %H:%M:%S" as asctime. A
# prefix such as "(APIServer pid=1) " may precede it.
_VLLM_LINE = re.compile(
    r"(?:INFO|DEBUG) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,]\d+)? \[[^\]]*\] "
    r"(?:(?P<received>Received request)|(?P<details>Request)|(?P<generated>Generated response)) (?P<rest>.*)",
    re.DOTALL,
)
# Both are the last field of this name in the line: prompts and answers, which come before it, may contain anything.
_PROMPT_IDS = re.compile(r".*\bprompt_token_ids: (?:None|\[([\d, ]*)\])(?:, |\.)", re.DOTALL)
_OUTPUT_IDS = re.compile(r".*\boutput_token_ids: (?:None|[\[(]([\d, ]*)[\])]), finish_reason: ", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def from_vllm(path: Path) -> ImportedTrace:
    """Read the log of `vllm serve --enable-log-requests --enable-log-outputs`, without `--max-log-len`.

    Of each request it has `Received request ID: ...`, `prompt_token_ids: [...]` in the same line (older versions) or in
    `Request ID details: ...` (newer ones, with VLLM_LOGGING_LEVEL=DEBUG), and one `Generated response ID: ...` or, of a
    streamed reply, one line per delta, with `output_token_ids: [...]`. Requests that have not ended are left out. Arrivals
    are known to the second, without the year.

    Source: vllm-project/vllm, vllm/entrypoints/logger.py (`RequestLogger`) and vllm/logger.py; pull request 20707.

    Raises:
        FileError: It has no such lines, or the token ids are missing from them.
    """
    received = dict[str, tuple[int, Moment]]()
    prompt_tokens, output_tokens = dict[str, int](), dict[str, int]()
    answered = False
    with _opened(path) as file:
        for line, text in _numbered(path, file):
            match = _VLLM_LINE.search(_COLOUR.sub("", text))
            if match is None:
                continue
            if match["generated"] is not None:
                answered = True
                _add_output(path, line, match["rest"], output_tokens)
                continue
            name, _, fields = match["rest"].partition(":")
            if match["received"] is not None:
                received[name] = line, _moment(path, line, match.groups()[:5])
            ids = _PROMPT_IDS.match(fields)
            if ids is not None and ids[1] is not None:
                prompt_tokens[name.removesuffix(" details")] = _count(ids[1])
    if not received:
        raise FileError(f"{path}: no line 'Received request': start vLLM with --enable-log-requests")
    if not answered:
        raise FileError(f"{path}: no line 'Generated response': start vLLM with --enable-log-outputs")
    of_second: dict[float, list[tuple[int, int]]] = {}
    for (name, (line, _)), second in zip(received.items(), _seconds([at for _, at in received.values()]), strict=True):
        if not output_tokens.get(name):
            continue
        if name not in prompt_tokens:
            raise FileError(
                f"{path}: line {line}: prompt_token_ids is missing; start vLLM with VLLM_LOGGING_LEVEL=DEBUG"
            )
        if prompt_tokens[name]:
            of_second.setdefault(second, []).append((prompt_tokens[name], output_tokens[name]))
    rows = [
        (arrival, *lengths)
        for second, requests in of_second.items()
        for arrival, lengths in zip(_evenly(second, 1.0, len(requests)), requests, strict=True)
    ]
    return _trace(path, rows, len(received) - len(rows), EVENLY.format(width="second"))


def from_litellm(path: Path) -> ImportedTrace:
    """Read LiteLLM's spend logs: the JSON of `GET /spend/logs`, or the table `LiteLLM_SpendLogs` as JSON or CSV.

    Each entry has `startTime` (ISO 8601; UTC if it has no offset), `prompt_tokens` and `completion_tokens`. Entries with 0 of
    either (failed calls, embeddings) are left out. The JSON is a list, or an object with the list as `data`.

    Source: BerriAI/litellm, schema.prisma (`LiteLLM_SpendLogs`) and litellm-js/spend-logs/src/_types.ts.

    Raises:
        FileError: It is neither, or a field is missing or wrong.
    """
    names, rows, left_out = ("startTime", "prompt_tokens", "completion_tokens"), [], 0
    for at, entry in _entries(path, names):
        prompt_tokens, output_tokens = _tokens(at, entry, names[1]), _tokens(at, entry, names[2])
        if prompt_tokens and output_tokens:
            rows.append((_time(at, entry, names[0]), prompt_tokens, output_tokens))
        else:
            left_out += 1
    return _trace(path, rows, left_out)


def from_openai(path: Path) -> ImportedTrace:
    """Read OpenAI's usage of completions: the JSON of `GET /v1/organization/usage/completions`, or the dashboard's CSV.

    Both have buckets, not requests: `start_time`, `end_time` (Unix seconds), and for each model or key the sums
    `num_model_requests`, `input_tokens` and `output_tokens`. The requests of a bucket are spread evenly over it, all with the
    mean lengths; buckets of one minute (`bucket_width=1m`) keep most of the load's shape. Empty buckets are ignored. The JSON
    is one page, or a list of pages.

    Source: https://platform.openai.com/docs/api-reference/usage/completions; the CSV has the same names as columns.

    Raises:
        FileError: It is neither, or a field is missing or wrong.
    """
    rows, left_out, width_s = [], 0, 0.0
    for at, bucket in _buckets(path):
        start_s, end_s = _number(at, bucket, "start_time"), _number(at, bucket, "end_time")
        if end_s <= start_s:
            raise FileError(f"{at}: end_time must be after start_time, not {end_s:g}")
        count = _whole(at, bucket, "num_model_requests", MAX_BUCKET_REQUESTS)
        sums = [_whole(at, bucket, name, MAX_TOKENS * count) for name in ("input_tokens", "output_tokens")]
        if not count or not all(sums):
            left_out += count
            continue
        prompt_tokens, output_tokens = (max(1, round(total / count)) for total in sums)
        rows += [(arrival, prompt_tokens, output_tokens) for arrival in _evenly(start_s, end_s - start_s, count)]
        width_s = max(width_s, end_s - start_s)
    spread = EVENLY.format(width=f"bucket of {width_s:g} s") + ", all with the mean lengths of their bucket"
    return _trace(path, rows, left_out, spread)


def _add_output(path: Path, line: int, rest: str, output_tokens: dict[str, int]) -> None:
    """Count the output tokens of a line `Generated response`; `rest` is what follows these words."""
    reply = re.match(r"(\S+?)(?: \(streaming (delta|complete)\))?: output: ", rest)
    ids = _OUTPUT_IDS.match(rest)
    if reply is None or ids is None:
        raise FileError(f"{path}: line {line}: output_token_ids is missing")
    if reply[2] == "complete":
        if ids[1] is not None:  # of the whole reply; else the deltas have them
            output_tokens[reply[1]] = _count(ids[1])
    elif ids[1] is None:
        raise FileError(f"{path}: line {line}: output_token_ids is None")
    else:
        output_tokens[reply[1]] = output_tokens.get(reply[1], 0) + _count(ids[1])


def _moment(path: Path, line: int, parts: Sequence[str]) -> Moment:
    month, day, hour, minute, second = map(int, parts)
    try:
        datetime(LEAP_YEAR, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        raise FileError(f"{path}: line {line}: {'-'.join(parts[:2])} {':'.join(parts[2:])} is no time") from None
    return month, day, hour, minute, second


def _seconds(moments: Sequence[Moment]) -> list[float]:
    """Seconds from one epoch for the lines of a log, in their order. A date far before the last one is of the next year."""
    leap = any(moment[:2] == (2, 29) for moment in moments)
    year, days = (LEAP_YEAR, 366) if leap else (LEAP_YEAR + 1, 365)
    result, passed_s, before = list[float](), 0.0, 0.0
    for month, day, hour, minute, second in moments:
        at = datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
        if at < before - days / 2 * 86_400:
            passed_s += days * 86_400
        before = at
        result.append(at + passed_s)
    return result


def _count(ids: str) -> int:
    return sum(1 for each in ids.split(",") if each.strip())


def _evenly(start_s: float, width_s: float, count: int) -> list[float]:
    """`count` arrivals, each in the middle of its share of the time."""
    return [start_s + width_s * (i + 0.5) / count for i in range(count)]


def _trace(path: Path, rows: list[tuple[float, int, int]], left_out: int, spread: str = "") -> ImportedTrace:
    """rows: (arrival in any epoch, prompt tokens, output tokens)."""
    if not rows:
        raise FileError(f"{path}: no requests with prompt and output tokens")
    rows.sort(key=lambda row: row[0])
    arrivals, inputs, outputs = zip(*rows, strict=True)
    work = Workload(np.array(arrivals) - arrivals[0], np.array(inputs, np.int64), np.array(outputs, np.int64))
    return ImportedTrace(work, left_out, spread)


def _buckets(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, fields) of each result of a usage export, with the times of its bucket. Empty buckets are left out."""
    if _is_csv(path):
        names = ("num_model_requests", "input_tokens", "output_tokens")
        for line, row in csv_rows(path, ("start_time", "end_time", *names)):
            if any(row[name] for name in names):
                yield f"{path}: line {line}", row
        return
    content = _json(path)
    pages = content if isinstance(content, list) else [content]
    for i, page in enumerate(pages):
        at = f"{path}: [{i}].data" if isinstance(content, list) else f"{path}: data"
        for j, bucket in enumerate(_list(at, page, "data")):
            for k, result in enumerate(_list(f"{at}[{j}].results", bucket, "results")):
                place = f"{at}[{j}].results[{k}]"
                if not isinstance(result, dict):
                    raise FileError(f"{place}: must be an object")
                yield place, {**result, **{name: bucket.get(name) for name in ("start_time", "end_time")}}


def _entries(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, fields) of each row of a CSV file, or of each object of a JSON list."""
    if _is_csv(path):
        for line, row in csv_rows(path, names):
            yield f"{path}: line {line}", row
        return
    content = _json(path)
    wrapped = isinstance(content, dict)
    for i, entry in enumerate(_list(f"{path}: data", content, "data") if wrapped else content):
        place = f"{path}: {'data' if wrapped else ''}[{i}]"
        if not isinstance(entry, dict):
            raise FileError(f"{place}: must be an object")
        yield place, entry


def _is_csv(path: Path) -> bool:
    """Whether the file is CSV by its name."""
    return path.name.removesuffix(".gz").endswith(".csv")


def _opened(path: Path) -> TextIO:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8", errors="replace")
        return path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None


def _numbered(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    """(number, text) of each line."""
    try:
        yield from enumerate(file, 1)
    except (OSError, EOFError) as error:
        raise FileError(f"{path}: {error}") from None


def _json(path: Path) -> Any:
    """A JSON list or object."""
    with _opened(path) as file:
        text = "".join(line for _, line in _numbered(path, file))
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileError(f"{path}: line {error.lineno}: no JSON: {error.msg}") from None
    except RecursionError:
        raise FileError(f"{path}: no JSON: nested too deeply") from None
    if not isinstance(content, dict | list):
        raise FileError(f"{path}: must be a JSON list or object")
    return content


def _list(place: str, owner: Any, name: str) -> list[Any]:
    value = owner.get(name) if isinstance(owner, dict) else None
    if not isinstance(value, list):
        raise FileError(f"{place}: {'is missing' if value is None else 'must be a list'}")
    return value


def _number(at: str, entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    if value is None or value == "":
        raise FileError(f"{at}: {name} is missing")
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise FileError(f"{at}: {name} '{str(value)[:80]}' is not a number")
    return number


def _whole(at: str, entry: Mapping[str, Any], name: str, most: int) -> int:
    number = _number(at, entry, name)
    if not 0 <= number <= most or number != int(number):
        raise FileError(f"{at}: {name} must be a whole number from 0 to {most:,}, not {number:g}")
    return int(number)


def _tokens(at: str, entry: Mapping[str, Any], name: str) -> int:
    return _whole(at, entry, name, MAX_TOKENS)


def _time(at: str, entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    if value is None or value == "":
        raise FileError(f"{at}: {name} is missing")
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise FileError(f"{at}: {name} '{str(value)[:80]}' is not a time of ISO 8601") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
