"""Cached prompt tokens from the ids of blocks: against a cache that is easy to believe, and from files of Mooncake's form."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.block_cache import cached_tokens
from benchmarks.mooncake import from_mooncake

Prompts = list[list[int]]


def believable(prompts: Prompts, inputs: list[int], cache_tokens: int, block_tokens: int) -> list[int]:
    """The same by a list of blocks in the order of their use, searched from one end to the other."""
    cache, result = list[int](), list[int]()
    for prompt, tokens in zip(prompts, inputs, strict=True):
        hits = 0
        for block in prompt:
            if block not in cache:
                break
            hits += 1
        result.append(min(hits * block_tokens, tokens - 1))
        cache = [block for block in cache if block not in prompt]
        cache += [block for i, block in reversed(list(enumerate(prompt))) if block not in prompt[:i]]
        cache = cache[max(0, len(cache) - cache_tokens // block_tokens) :]
    return result


@st.composite
def traces(draw: st.DrawFn) -> tuple[Prompts, list[int], int]:
    """Chats: prompts that continue earlier ones, begin like them, or are new; blocks of 1 to 20 tokens."""
    block_tokens = draw(st.integers(1, 20))
    prompts, inputs, new = Prompts(), list[int](), 0
    for _ in range(draw(st.integers(1, 25))):
        before = draw(st.sampled_from([[], *prompts]))
        kept = before[: draw(st.integers(0, len(before)))]
        more = draw(st.integers(0 if kept else 1, 6))
        prompts.append([*kept, *range(new, new + more)])
        new += more
        inputs.append(len(prompts[-1]) * block_tokens - draw(st.integers(0, block_tokens - 1)))
    return prompts, inputs, block_tokens


@settings(deadline=None, max_examples=80)
@given(traces(), st.integers(1, 40))
def test_the_cache_is_the_believable_one_and_a_larger_one_has_no_less(
    trace: tuple[Prompts, list[int], int], blocks: int
) -> None:
    prompts, inputs, block_tokens = trace
    lengths, size = np.array(inputs), blocks * block_tokens
    found = cached_tokens(prompts, lengths, size, block_tokens)
    assert found.tolist() == believable(prompts, inputs, size, block_tokens)
    assert (found <= lengths - 1).all()
    assert (cached_tokens(prompts, lengths, size + block_tokens, block_tokens) >= found).all()


def test_beginnings_outlive_ends_and_at_least_one_token_is_computed() -> None:
    """Three blocks have room: of a prompt of four, the last is gone first."""
    prompts = [[0, 1, 2, 3], [0, 1, 2, 3], [9], [0, 1, 2, 3], [0, 1]]
    found = cached_tokens(prompts, np.array([40, 40, 10, 40, 20]), 30, 10)
    assert found.tolist() == [0, 30, 0, 20, 19]


ENTRIES: list[dict[str, Any]] = [
    {"timestamp": 3000, "input_length": 1500, "output_length": 4, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3], "x": 1},
    {"timestamp": 4500, "input_length": 1500, "output_length": 9, "hash_ids": [0, 1, 2]},
    {"timestamp": 5000, "input_length": 0, "output_length": 9, "hash_ids": []},
]


def json_lines(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    return path


def table(path: Path) -> Path:
    lines = ["arrival_s,input_tokens,output_tokens,hash_ids"]
    for entry in ENTRIES:
        ids = " ".join(map(str, entry["hash_ids"]))
        lines.append(f"{entry['timestamp'] / 1000},{entry['input_length']},{entry['output_length']},{ids}")
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_traces_of_mooncakes_form_are_read_as_published_and_as_csv(tmp_path: Path) -> None:
    """In the order of arrivals, whatever that of the file; requests without tokens are left out."""
    for path in (json_lines(tmp_path / "trace.jsonl", ENTRIES), table(tmp_path / "trace.csv.gz")):
        imported = from_mooncake(path, 10_000)
        work = imported.requests
        assert work.arrival_s.tolist() == [0.0, 3.0, 4.5]
        assert work.input_tokens.tolist() == [1100, 1500, 1500]
        assert work.output_tokens.tolist() == [7, 4, 9]
        assert work.cached_tokens.tolist() == [0, 1024, 1499]
        assert imported.left_out == 1
        assert from_mooncake(path, 512).requests.cached_tokens.tolist() == [0, 512, 512]
