"""The CSV files of a planning question: the trace, and judged prompts. FileError names file, line and column."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from penstock.question_files.csv_files import csv_count, csv_number, csv_rows
from penstock.question_files.errors import FileError
from penstock.types.limits import MAX_TOKENS
from penstock.types.planning import JudgedPrompt, JudgedPrompts, Trace
from penstock.types.ranges import SCORE, range_problems
from penstock.types.rules import MAX_EARLY_CHECKS

SCORE_AFTER = "score_after_"  # tokens: the column of parts of a tier's answers
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
        cached = csv_count(path, line, row, "cached_tokens") if "cached_tokens" in row else 0
        rows.append(
            (
                csv_number(path, line, row, "arrival_s"),
                csv_count(path, line, row, "input_tokens"),
                csv_count(path, line, row, "output_tokens"),
                cached,
            )
        )
    for field, problem in range_problems(Trace.of(rows)):
        name, index = _place(field)[1:]
        raise FileError(f"{path}: line {lines[index]}: {name} {problem}")
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

    Also {tier}_score_after_{tokens} of unfinished answers, empty where one has no more: see `penstock measure --early-after`.
    """
    expected = ("input_tokens", *(f"{tier}_{what}" for tier in tiers for what in ("output_tokens", "judge_score")))
    lines, prompts, after = list[int](), list[JudgedPrompt](), list[int]()
    for line, row in csv_rows(path, expected):
        after = after or _after_tokens(path, row, tiers)
        lines.append(line)

        def numbers(
            end: str, most: float = SCORE.most, line: int = line, row: dict[str, str] = row
        ) -> tuple[float, ...]:
            """Of each tier; empty where one has no such column."""
            columns = [f"{tier}_{end}" for tier in tiers]
            if not all(column in row for column in columns):
                return ()
            return tuple(csv_number(path, line, row, column, SCORE.least, most) for column in columns)

        prompts.append(
            JudgedPrompt(
                csv_count(path, line, row, "input_tokens"),
                tuple(csv_count(path, line, row, f"{tier}_output_tokens") for tier in tiers),
                numbers("judge_score"),
                numbers("predicted_score"),
                tuple(_part_scores(path, line, row, tier, after) for tier in tiers) if after else (),
                numbers("quality"),
                tuple(score > 0 for score in numbers("refused", 1)),
            )
        )
    judged = JudgedPrompts(tuple(prompts), tuple(after))
    for field, problem in range_problems(judged):
        prompt, name, tier_index = _place(field)
        column = f"{tiers[tier_index]}_{COLUMNS[name]}" if name in COLUMNS else name
        raise FileError(f"{path}: line {lines[prompt]}: {column} {problem}")
    return judged


def _place(field: str) -> tuple[int, str, int]:
    """(prompt, name, index) of `prompts[3].judge_scores[1]`; 0 for what it does not have."""
    match = _PLACE.fullmatch(field)
    assert match is not None
    return int(match[1] or 0), match[2], int(match[3] or 0)


def _after_tokens(path: Path, row: dict[str, str], tiers: Sequence[str]) -> list[int]:
    """After how many tokens parts of any tier's answers were scored, ascending."""
    starts = [f"{tier}_{SCORE_AFTER}" for tier in tiers]
    ends = {name.removeprefix(start) for name in row if name for start in starts if name.startswith(start)}
    ends = {end for end in ends if end.isdecimal()}
    if too_long := [end for end in ends if len(end) > len(str(MAX_TOKENS)) or int(end) > MAX_TOKENS]:
        problem = f"{SCORE_AFTER}N of a tier must be of at most {MAX_TOKENS:,} tokens, not {too_long[0][:80]}"
        raise FileError(f"{path}: line 1: {problem}")
    after = sorted(int(end) for end in ends if int(end) > 0)
    if len(after) > MAX_EARLY_CHECKS:
        raise FileError(f"{path}: line 1: {len(after)} columns {SCORE_AFTER}N of a tier, at most {MAX_EARLY_CHECKS}")
    return after


def _part_scores(path: Path, line: int, row: dict[str, str], tier: str, after: Sequence[int]) -> tuple[float, ...]:
    """By number of tokens, NaN where there is none, without the last ones of these."""
    scores = list[float]()
    for tokens in after:
        column = f"{tier}_{SCORE_AFTER}{tokens}"
        if not row.get(column):
            scores.append(math.nan)
            continue
        if csv_count(path, line, row, f"{tier}_output_tokens") <= tokens:
            raise FileError(
                f"{path}: line {line}: {column}: the answer has no more than {tokens} tokens: leave it empty"
            )
        scores.append(csv_number(path, line, row, column, SCORE.least, SCORE.most))
    while scores and math.isnan(scores[-1]):
        scores.pop()
    return tuple(scores)
