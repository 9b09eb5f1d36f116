"""Judged prompts: a CSV file of what each tier answered and what its answers are worth."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner_service.early_checks import PartScores
from planner_service.files.csv_files import csv_count, csv_number, csv_rows
from planner_service.files.errors import FileError
from planner_service.routing.quality import JudgedSample
from planner_service.simulator.workload import MAX_TOKENS
from services.domain.early_checks import MAX_EARLY_CHECKS

SCORE_AFTER = "score_after_"  # tokens: the column of parts of a tier's answers


def read_quality(path: Path, tiers: tuple[str, ...]) -> JudgedSample:
    """Columns input_tokens and, for each tier, {tier}_output_tokens and {tier}_judge_score (0 to 100).

    Also {tier}_predicted_score (0 to 100), if every tier has it: see `penstock predictor`.

    Also {tier}_quality (0 to 100), if every tier has it: what the answers are worth, where that is not the judge's score.

    Also {tier}_refused (0 or 1), if every tier has it: whether a guard of the judge has refused the answer.

    Also {tier}_score_after_{tokens} of unfinished answers, empty where one has no more: see `penstock measure --early-after`.

    An empty answer counts as one token: it costs a step to find out.
    """
    expected = ("input_tokens", *(f"{tier}_{what}" for tier in tiers for what in ("output_tokens", "judge_score")))
    inputs, outputs, scores, predicted, quality, refused, parts = [], [], [], [], [], [], []
    after = list[int]()
    predictions = [f"{tier}_predicted_score" for tier in tiers]
    qualities = [f"{tier}_quality" for tier in tiers]
    refusals = [f"{tier}_refused" for tier in tiers]
    for line, row in csv_rows(path, expected):
        after = after or _after_tokens(path, row, tiers)
        inputs.append(csv_count(path, line, row, "input_tokens", 0, MAX_TOKENS))
        outputs.append([csv_count(path, line, row, f"{tier}_output_tokens", 0, MAX_TOKENS) for tier in tiers])
        parts.append([_part_scores(path, line, row, tier, after) for tier in tiers])
        scores.append([csv_number(path, line, row, f"{tier}_judge_score", 0, 100) for tier in tiers])
        if all(column in row for column in predictions):
            predicted.append([csv_number(path, line, row, column, 0, 100) for column in predictions])
        if all(column in row for column in qualities):
            quality.append([csv_number(path, line, row, column, 0, 100) for column in qualities])
        if all(column in row for column in refusals):
            refused.append([csv_number(path, line, row, column, 0, 1) > 0 for column in refusals])
    shape = (len(inputs), len(tiers))
    return JudgedSample(
        tiers,
        np.maximum(1, np.array(inputs, np.int64)),
        np.maximum(1, np.array(outputs, np.int64).reshape(shape)),
        np.array(scores, float).reshape(shape),
        np.array(predicted, float) if predicted else None,
        parts=PartScores(tuple(after), np.array(parts, float)) if after else None,
        known_quality=np.array(quality, float) if quality else None,
        refused=np.array(refused, np.bool_) if refused else None,
    )


def _after_tokens(path: Path, row: dict[str, str], tiers: tuple[str, ...]) -> list[int]:
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


def _part_scores(path: Path, line: int, row: dict[str, str], tier: str, after: Sequence[int]) -> list[float]:
    """By number of tokens; NaN where there is none. An answer has one only where it has more tokens."""
    scores = []
    for tokens in after:
        column = f"{tier}_{SCORE_AFTER}{tokens}"
        if not row.get(column):
            scores.append(math.nan)
            continue
        if csv_count(path, line, row, f"{tier}_output_tokens", 0) <= tokens:
            raise FileError(
                f"{path}: line {line}: {column}: the answer has no more than {tokens} tokens: leave it empty"
            )
        scores.append(csv_number(path, line, row, column, 0, 100))
    return scores
