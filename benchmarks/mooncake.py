"""Traces with the ids of each prompt's blocks, as Mooncake's."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.block_cache import BLOCK_TOKENS, block_problem, cached_tokens
from penstock.planner_service.trace_importers.imported import ImportedTrace, trace_of
from penstock.planner_service.trace_importers.log_files import (
    TOO_MANY_DIGITS,
    is_csv,
    numbered,
    opened,
    token_count,
)
from penstock.question_files.csv_files import csv_rows, number_of
from penstock.question_files.errors import FileError


def from_mooncake(path: Path, cache_tokens: int, block_tokens: int = BLOCK_TOKENS) -> ImportedTrace:
    """Read a trace with the ids of each prompt's blocks, and say what a prefix cache of `cache_tokens` has of each prompt.

    JSON lines as published: `timestamp` (milliseconds), `input_length`, `output_length`, `hash_ids` (a list); or CSV with the
    columns `arrival_s`, `input_tokens`, `output_tokens`, `hash_ids` (ids with spaces between them). Requests without input or
    output tokens are left out. See block_cache.cached_tokens.

    Source: kvcache-ai/Mooncake, FAST25-release/traces.

    Raises:
        FileError: It is neither, a field is missing or wrong, or a prompt has not as many blocks as its tokens need.
        InvalidRequest: See block_cache.cached_tokens.
    """
    requests, left_out = list[tuple[float, int, int, tuple[str, ...]]](), 0
    for at, arrival_s, names, entry in _hashed(path):
        prompt_tokens, output_tokens = token_count(at, entry, names[0]), token_count(at, entry, names[1])
        if not prompt_tokens or not output_tokens:
            left_out += 1
            continue
        ids = _hash_ids(at, entry)
        if problem := block_problem(len(ids), prompt_tokens, block_tokens):
            raise FileError(f"{at}: hash_ids: {problem}")
        requests.append((arrival_s, prompt_tokens, output_tokens, ids))
    requests.sort(key=lambda request: request[0])
    prompts, inputs = [request[3] for request in requests], np.array([request[1] for request in requests], np.int64)
    cached = cached_tokens(prompts, inputs, cache_tokens, block_tokens).tolist()
    rows = [(request[0], request[1], request[2], tokens) for request, tokens in zip(requests, cached, strict=True)]
    return trace_of(path, rows, left_out)


def _hashed(path: Path) -> Iterator[tuple[str, float, tuple[str, str], Mapping[str, Any]]]:
    """(place, arrival in seconds, the names of its token counts, fields) of each request of a trace with block ids."""
    if is_csv(path):
        names = ("input_tokens", "output_tokens")
        for place, row in csv_rows(path, ("arrival_s", *names, "hash_ids")):
            yield place, number_of(place, row, "arrival_s"), names, row
        return
    with opened(path) as file:
        for line, text in numbered(path, file):
            if not text.strip():
                continue
            place = f"{path}: line {line}"
            try:
                entry = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                raise FileError(f"{place}: no JSON: {error}") from None
            except ValueError:  # Python limits the digits of an int
                raise FileError(f"{place}: no usable JSON: {TOO_MANY_DIGITS}") from None
            if not isinstance(entry, dict):
                raise FileError(f"{place}: must be an object")
            yield place, number_of(place, entry, "timestamp") / 1000, ("input_length", "output_length"), entry


def _hash_ids(at: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids of a prompt's blocks, as text."""
    value = entry.get("hash_ids")
    ids = value.split() if isinstance(value, str) else value
    if not isinstance(ids, list):
        raise FileError(f"{at}: hash_ids {'is missing' if value is None else 'must be a list of block ids'}")
    if wrong := [each for each in ids if isinstance(each, bool) or not isinstance(each, int | str)]:
        raise FileError(f"{at}: hash_ids must be block ids, not '{str(wrong[0])[:80]}'")
    return tuple(map(str, ids))
