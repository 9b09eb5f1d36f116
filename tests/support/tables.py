"""Writes tables that the planner reads: traces and judged prompts."""

import gzip
from collections.abc import Iterable
from pathlib import Path

from penstock.planner_service.routing.quality import JudgedSample


def write_table(path: Path, header: str, rows: Iterable[Iterable[object]]) -> Path:
    """header: the names of the columns, with commas. A name that ends in .gz is compressed."""
    text = "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_trace(path: Path, rows: Iterable[Iterable[object]]) -> Path:
    """rows: arrival in seconds, input tokens, output tokens."""
    return write_table(path, "arrival_s,input_tokens,output_tokens", rows)


def judged_header(tiers: Iterable[str], *more: str) -> str:
    """Columns of judged prompts. more: of each tier, after its tokens and score."""
    return ",".join(
        ("input_tokens", *(f"{tier}_{what}" for tier in tiers for what in ("output_tokens", "judge_score", *more)))
    )


def write_judged(path: Path, judged: JudgedSample) -> Path:
    """The prompts of a sample."""
    rows = []
    for i, tokens in enumerate(judged.input_tokens):
        cells: list[object] = [tokens]
        for t in range(len(judged.tiers)):
            cells += [judged.output_tokens[i, t], judged.scores[i, t]]
        rows.append(cells)
    return write_table(path, judged_header(judged.tiers), rows)
