"""The spend logs of LiteLLM."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.planner_service.trace_importers.imported import ImportedTrace, Row, trace_of
from penstock.planner_service.trace_importers.log_files import Entry, is_csv, list_of, objects, read_json, token_count
from penstock.question_files.csv_files import csv_rows
from penstock.question_files.errors import FileError


def from_litellm(path: Path) -> ImportedTrace:
    """Read LiteLLM's spend logs: the JSON of `GET /spend/logs`, or the table `LiteLLM_SpendLogs` as JSON or CSV.

    Each entry has `startTime` (ISO 8601; UTC if it has no offset), `prompt_tokens` and `completion_tokens`. Entries with 0 of
    either (failed calls, embeddings) are left out. The JSON is a list, or an object with the list as `data`.

    Cached prompt tokens are those that the model's provider counted: `prompt_tokens_details.cached_tokens` in
    `additional_usage_values` or `usage_object` of `metadata`, an object or its JSON; 0 where there are none. At most all
    prompt tokens but one: of some providers `prompt_tokens` does not include them.

    Source: BerriAI/litellm, schema.prisma (`LiteLLM_SpendLogs`), litellm-js/spend-logs/src/_types.ts, and
    litellm/proxy/spend_tracking/spend_tracking_utils.py.

    Raises:
        FileError: It is neither, or a field is missing or wrong.
    """
    names, rows, left_out = ("startTime", "prompt_tokens", "completion_tokens"), list[Row](), 0
    for at, entry in _entries(path, names):
        prompt_tokens, output_tokens = token_count(at, entry, names[1]), token_count(at, entry, names[2])
        if prompt_tokens and output_tokens:
            cached_tokens = min(_cached_tokens(at, entry), prompt_tokens - 1)
            rows.append((_time(at, entry, names[0]), prompt_tokens, output_tokens, cached_tokens))
        else:
            left_out += 1
    return trace_of(path, rows, left_out)


def _cached_tokens(at: str, entry: Mapping[str, Any]) -> int:
    """The cached prompt tokens of an entry of LiteLLM's spend logs; 0 where it does not say."""
    metadata = entry.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError):  # also for an int of more digits than Python reads
            return 0
    for name in ("additional_usage_values", "usage_object"):
        usage = metadata.get(name) if isinstance(metadata, dict) else None
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        if isinstance(details, dict) and details.get("cached_tokens") is not None:
            return token_count(f"{at}: metadata.{name}.prompt_tokens_details", details, "cached_tokens")
    return 0


def _entries(path: Path, names: tuple[str, ...]) -> Iterable[Entry]:
    """Of a CSV file, or of a JSON list."""
    if is_csv(path):
        return csv_rows(path, names)
    content = read_json(path)
    if isinstance(content, dict):
        return objects(f"{path}: data", list_of(f"{path}: data", content, "data"))
    return objects(f"{path}: ", content)


def _time(at: str, entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    if value is None or value == "":
        raise FileError(f"{at}: {name} is missing")
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise FileError(f"{at}: {name} '{str(value)[:80]}' is not a time of ISO 8601") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
