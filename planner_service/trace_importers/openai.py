"""OpenAI's usage of completions."""

from collections.abc import Iterator
from pathlib import Path

from penstock.planner_service.simulator.workload import MAX_TOKENS
from penstock.planner_service.trace_importers.imported import EVENLY, ImportedTrace, Row, evenly, trace_of
from penstock.planner_service.trace_importers.log_files import Entry, is_csv, list_of, objects, read_json
from penstock.question_files.csv_files import csv_rows, number_of, whole_number
from penstock.question_files.errors import FileError
from penstock.types.ranges import Within

MAX_BUCKET_REQUESTS = 1_000_000  # of one bucket of a usage export


def from_openai(path: Path) -> ImportedTrace:
    """Read OpenAI's usage of completions: the JSON of `GET /v1/organization/usage/completions`, or the dashboard's CSV.

    Both have buckets, not requests: `start_time`, `end_time` (Unix seconds), and for each model or key the sums
    `num_model_requests`, `input_tokens` and `output_tokens`. The requests of a bucket are spread evenly over it, all with the
    mean lengths; buckets of one minute (`bucket_width=1m`) keep most of the load's shape. Empty buckets are ignored. The JSON
    is one page, or a list of pages. `input_cached_tokens`, of the input tokens, is optional.

    Source: https://platform.openai.com/docs/api-reference/usage/completions; the CSV has the same names as columns.

    Raises:
        FileError: It is neither, or a field is missing or wrong.
    """
    rows, left_out, width_s = list[Row](), 0, 0.0
    for at, bucket in _buckets(path):
        start_s, end_s = number_of(at, bucket, "start_time"), number_of(at, bucket, "end_time")
        if end_s <= start_s:
            raise FileError(f"{at}: end_time must be after start_time, not {end_s:g}")
        count = whole_number(at, bucket, "num_model_requests", Within(0, MAX_BUCKET_REQUESTS))
        most = Within(0, MAX_TOKENS * count)
        sums = [whole_number(at, bucket, name, most) for name in ("input_tokens", "output_tokens")]
        if not count or not all(sums):
            left_out += count
            continue
        cached = 0
        if bucket.get("input_cached_tokens"):
            cached = whole_number(at, bucket, "input_cached_tokens", Within(0, sums[0]))
        prompt_tokens, output_tokens = (max(1, round(total / count)) for total in sums)
        means = prompt_tokens, output_tokens, min(cached // count, prompt_tokens - 1)
        rows += [(arrival, *means) for arrival in evenly(start_s, end_s - start_s, count)]
        width_s = max(width_s, end_s - start_s)
    spread = EVENLY.format(width=f"bucket of {width_s:g} s") + ", all with the mean lengths of their bucket"
    return trace_of(path, rows, left_out, spread)


def _buckets(path: Path) -> Iterator[Entry]:
    """The results of a usage export, with the times of their buckets. Empty buckets are left out."""
    if is_csv(path):
        names = ("num_model_requests", "input_tokens", "output_tokens")
        for place, row in csv_rows(path, ("start_time", "end_time", *names)):
            if any(row[name] for name in names):
                yield place, row
        return
    content = read_json(path)
    pages = content if isinstance(content, list) else [content]
    for i, page in enumerate(pages):
        at = f"{path}: [{i}].data" if isinstance(content, list) else f"{path}: data"
        for j, bucket in enumerate(list_of(at, page, "data")):
            results = f"{at}[{j}].results"
            for place, result in objects(results, list_of(results, bucket, "results")):
                yield place, {**result, **{name: bucket.get(name) for name in ("start_time", "end_time")}}
