"""The CSV files of a planning question: the trace, and judged prompts. FileError names file, line and column."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from penstock.question_files.csv_files import csv_rows, number_of, whole_number
from penstock.question_files.errors import FileError
from penstock.types.planning import SHARE, JudgedPrompt, JudgedPrompts, Trace
from penstock.types.ranges import NOT_NEGATIVE, SCORE, Within, range_of

_TRACED, _JUDGED = range_of(Trace, "input_tokens"), range_of(JudgedPrompt, "input_tokens")
"""Numbers of tokens."""


def load_trace(path: Path) -> Trace:
    """Columns arrival_s, input_tokens, output_tokens, and cached_tokens where it has them; other columns are passed over.

    Ordered by arrival.
    """
    requests = list[tuple[float, int, int, int]]()
    for place, row in csv_rows(path, ("arrival_s", "input_tokens", "output_tokens")):
        arrival_s = number_of(place, row, "arrival_s")
        inputs, outputs = (whole_number(place, row, name, _TRACED) for name in ("input_tokens", "output_tokens"))
        cached = whole_number(place, row, "cached_tokens", NOT_NEGATIVE) if "cached_tokens" in row else 0
        if cached >= inputs:
            raise FileError(f"{place}: cached_tokens must be less than input_tokens, {inputs}, not {cached}")
        requests.append((arrival_s, inputs, outputs, cached))
    return Trace.of(sorted(requests, key=lambda request: request[0]))


def load_judged(path: Path, tiers: Sequence[str]) -> JudgedPrompts:
    """Columns input_tokens and, for each tier, {tier}_output_tokens and {tier}_judge_score (0 to 100).

    Also {tier}_predicted_score (0 to 100), if every tier has it: see `penstock predictor`.

    Also {tier}_quality (0 to 100), if every tier has it: what the answers are worth, where that is not the judge's score.

    Also {tier}_refused (0 or 1), if every tier has it: whether a guard of the judge has refused the answer.
    """
    expected = ("input_tokens", *(f"{tier}_{what}" for tier in tiers for what in ("output_tokens", "judge_score")))
    prompts = list[JudgedPrompt]()
    for place, row in csv_rows(path, expected):
        inputs = whole_number(place, row, "input_tokens", _JUDGED)
        outputs = tuple(whole_number(place, row, f"{tier}_output_tokens", _JUDGED) for tier in tiers)
        of_tiers = partial(_of_tiers, place, row, tiers)
        judged, predicted, qualities = (of_tiers(end) for end in ("judge_score", "predicted_score", "quality"))
        refused = tuple(score > 0 for score in of_tiers("refused", SHARE))
        prompts.append(JudgedPrompt(inputs, outputs, judged, predicted, qualities, refused))
    return JudgedPrompts(tuple(prompts))


def _of_tiers(
    place: str, row: dict[str, str], tiers: Sequence[str], end: str, within: Within = SCORE
) -> tuple[float, ...]:
    """The numbers in the columns of the tiers that end so; empty where one has no such column."""
    columns = [f"{tier}_{end}" for tier in tiers]
    if not all(column in row for column in columns):
        return ()
    return tuple(number_of(place, row, column, within) for column in columns)
