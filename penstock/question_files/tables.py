"""The CSV files of a planning question: the trace, and judged prompts. FileError names file, line and column."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from penstock.question_files.csv_files import csv_rows, number_of, whole_number
from penstock.question_files.errors import FileError
from penstock.types.planning import SHARE, JudgedPrompt, JudgedPrompts, Trace
from penstock.types.ranges import SCORE, Within, range_problems

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
    places = list[str]()
    rows = list[tuple[float, int, int, int]]()
    for place, row in csv_rows(path, ("arrival_s", "input_tokens", "output_tokens")):
        places.append(place)
        arrival_s = number_of(place, row, "arrival_s")
        inputs, outputs = (whole_number(place, row, name) for name in ("input_tokens", "output_tokens"))
        cached = whole_number(place, row, "cached_tokens") if "cached_tokens" in row else 0
        rows.append((arrival_s, inputs, outputs, cached))
    for each in range_problems(Trace.of(rows)):
        name, index = _place(each.field)[1:]
        raise FileError(f"{places[index]}: {name} {each.problem}")
    for place, (_, inputs, _, cached) in zip(places, rows, strict=True):
        if cached >= inputs:
            raise FileError(f"{place}: cached_tokens must be less than input_tokens, {inputs}, not {cached}")
    return Trace.of(sorted(rows, key=lambda row: row[0]))


def load_judged(path: Path, tiers: Sequence[str]) -> JudgedPrompts:
    """Columns input_tokens and, for each tier, {tier}_output_tokens and {tier}_judge_score (0 to 100).

    Also {tier}_predicted_score (0 to 100), if every tier has it: see `penstock predictor`.

    Also {tier}_quality (0 to 100), if every tier has it: what the answers are worth, where that is not the judge's score.

    Also {tier}_refused (0 or 1), if every tier has it: whether a guard of the judge has refused the answer.
    """
    expected = ("input_tokens", *(f"{tier}_{what}" for tier in tiers for what in ("output_tokens", "judge_score")))
    places, prompts = list[str](), list[JudgedPrompt]()
    for place, row in csv_rows(path, expected):
        places.append(place)
        inputs = whole_number(place, row, "input_tokens")
        outputs = tuple(whole_number(place, row, f"{tier}_output_tokens") for tier in tiers)
        of_tiers = partial(_of_tiers, place, row, tiers)
        judged, predicted, qualities = (of_tiers(end) for end in ("judge_score", "predicted_score", "quality"))
        refused = tuple(score > 0 for score in of_tiers("refused", SHARE))
        prompts.append(JudgedPrompt(inputs, outputs, judged, predicted, qualities, refused))
    whole = JudgedPrompts(tuple(prompts))
    for each in range_problems(whole):
        prompt, name, tier_index = _place(each.field)
        column = f"{tiers[tier_index]}_{COLUMNS[name]}" if name in COLUMNS else name
        raise FileError(f"{places[prompt]}: {column} {each.problem}")
    return whole


def _of_tiers(
    place: str, row: dict[str, str], tiers: Sequence[str], end: str, within: Within = SCORE
) -> tuple[float, ...]:
    """The numbers in the columns of the tiers that end so; empty where one has no such column."""
    columns = [f"{tier}_{end}" for tier in tiers]
    if not all(column in row for column in columns):
        return ()
    return tuple(number_of(place, row, column, within) for column in columns)


def _place(field: str) -> tuple[int, str, int]:
    """(prompt, name, index) of `prompts[3].judge_scores[1]`; 0 for what it does not have."""
    match = _PLACE.fullmatch(field)
    assert match is not None
    return int(match[1] or 0), match[2], int(match[3] or 0)
