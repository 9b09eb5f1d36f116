"""The prompts that are judged and replayed."""

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from models.training import tasks
from models.training.measure import fit_problems, write_heldout
from penstock.cli.held_out import Question, read_questions

SEED = 9_000  # of drawn prompts, added to the benchmark's


def of_shipped_family(count: int, seed: int) -> list[Question]:
    """`count` held-out prompts of distinct content: neither trained on nor used to calibrate the judge.

    Raises:
        FileError: There are not so many.
    """
    fitted = {problem.key for problem in fit_problems()}
    drawn = tasks.held_out(count + min(count, len(fitted)), SEED + seed)
    chosen = itertools.islice((problem for problem in drawn if problem.key not in fitted), count)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "questions.jsonl"
        write_heldout(file, list(chosen))
        return read_questions(file, count)


def part(questions: Sequence[Question], count: int, number: int) -> list[Question]:
    """Part `number` of the questions, `count` in each; no question comes again before all have come.

    So rounds have other prompts, and none is in a prefix cache from a round before, where there are enough.
    """
    first = number * count
    return [questions[at % len(questions)] for at in range(first, first + count)]
