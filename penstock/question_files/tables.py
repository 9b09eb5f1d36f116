"""The CSV files of a planning question: the trace, and judged prompts. FileError names file, line and column."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from penstock.question_files.csv_files import csv_count, csv_number, csv_rows
from penstock.question_files.errors import FileError
from penstock.types.planning import JudgedPrompt, JudgedPrompts, Trace
from penstock.types.ranges import SCORE, range_problems

COLUMNS = {
    "output_tokens": "output_tokens",
    "judge_scores": "judge_score",
    "predicted_scores": "predicted_score",
    "qualities": "quality",
    "refused": "refused",
}
"""Of a judged prompt's fields, by tier: the end of the column's name."""
_PLACE = re.compile(r"(?:prompts\[(\d+)\]\.)?(\w+)(?:\[(\d+)\])?")


def load_trace(path: Path) -> Trace:
    """Columns arrival_s, input_tokens, output_tokens, and cached_tokens where it has them; other columns are passed over.

    Ordered by arrival.
    """
    lines = list[int]()
    rows = list[tuple[float, int, int, int]]()
    for line, row in csv_rows(path, ("arrival_s", "input_tokens", "output_tokens")):
        lines.append(line)
        arrival_s = csv_number(path, line, row, "arrival_s")
        inputs, outputs = (csv_count(path, line, row, name) for name in ("input_tokens", "output_tokens"))
        cached = csv_count(path, line, row, "cached_tokens") if "cached_tokens" in row else 0
        rows.append((arrival_s, inputs, outputs, cached))
    for each in range_problems(Trace.of(rows)):
        name, index = _place(each.field)[1:]
        raise FileError(f"{path}: line {lines[index]}: {name} {each.problem}")
    for line, (_, inputs, _, cached) in zip(lines, rows, strict=True):
        if cached >= inputs:
            raise FileError(
                f"{path}: line {line}: cached_tokens must be less than input_tokens, {inputs}, not {cached}"
            )
    return Trace.of(sorted(rows, key=lambda row: row[0]))


def load_judged(path: Path, tiers: Sequence[str]) -> JudgedPrompts:
    """Columns input_tokens and, for each tier, {tier}_output_tokens and {tier}_judge_score (0 to 100).

    Also {tier}_predicted_score (0 to 100), if every tier has it: see `penstock predictor`.

    Also {tier}_quality (0 to 100), if every tier has it: what the answers are worth, where that is not the judge's score.

    Also {tier}_refused (0 or 1), if every tier has it: whether a guard of the judge has refused the answer.
    """
    expected = ("input_tokens", *(f"{tier}_{what}" for tier in tiers for what in ("output_tokens", "judge_score")))
    lines, prompts = list[int](), list[JudgedPrompt]()
    for line, row in csv_rows(path, expected):
        lines.append(line)
        inputs = csv_count(path, line, row, "input_tokens")
        outputs = tuple(csv_count(path, line, row, f"{tier}_output_tokens") for tier in tiers)
        of_tiers = partial(_of_tiers, path, line, row, tiers)
        judged, predicted, qualities = (of_tiers(end) for end in ("judge_score", "predicted_score", "quality"))
        refused = tuple(score > 0 for score in of_tiers("refused", 1))
        prompts.append(JudgedPrompt(inputs, outputs, judged, predicted, qualities, refused))
    whole = JudgedPrompts(tuple(prompts))
    for each in range_problems(whole):
        prompt, name, tier_index = _place(each.field)
        column = f"{tiers[tier_index]}_{COLUMNS[name]}" if name in COLUMNS else name
        raise FileError(f"{path}: line {lines[prompt]}: {column} {each.problem}")
    return whole


def _of_tiers(
    path: Path, line: int, row: dict[str, str], tiers: Sequence[str], end: str, most: float = SCORE.most
) -> tuple[float, ...]:
    """The numbers in the columns of the tiers that end so; empty where one has no such column."""
    columns = [f"{tier}_{end}" for tier in tiers]
    if not all(column in row for column in columns):
        return ()
    return tuple(csv_number(path, line, row, column, SCORE.least, most) for column in columns)


def _place(field: str) -> tuple[int, str, int]:
    """(prompt, name, index) of `prompts[3].judge_scores[1]`; 0 for what it does not have."""
    match = _PLACE.fullmatch(field)
    assert match is not None
    return int(match[1] or 0), match[2], int(match[3] or 0)
