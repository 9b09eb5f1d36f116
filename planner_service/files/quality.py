"""Judged prompts of a question, as routing has them."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from penstock.planner_service.routing.quality import JudgedSample, PartScores
from penstock.planner_service.simulator.workload import Floats
from penstock.question_files import load_judged
from penstock.services.domain.errors import InvalidRequest, invalid
from penstock.types.planning import JudgedPrompt, JudgedPrompts
from penstock.types.problems import FieldProblem
from penstock.types.ranges import range_problems
from penstock.types.rules import MAX_EARLY_CHECKS


def read_quality(path: Path, tiers: tuple[str, ...]) -> JudgedSample:
    """See load_judged for the columns."""
    return judged_of(load_judged(path, tiers), tiers)


def judged_of(judged: JudgedPrompts, tiers: tuple[str, ...], at: str = "quality") -> JudgedSample:
    """An empty prompt or answer counts as one token: it costs a step to find out.

    Raises:
        InvalidRequest: A field is unsound; named from `at` on.
    """
    prompts = judged.prompts
    if not prompts:
        raise invalid(f"{at}.prompts", "no prompts")
    if problems := [FieldProblem(*problem) for problem in range_problems(judged, at)]:
        raise InvalidRequest(*problems)
    for name in ("output_tokens", "judge_scores"):
        for i, prompt in enumerate(prompts):
            if len(getattr(prompt, name)) != len(tiers):
                count = len(getattr(prompt, name))
                raise invalid(f"{at}.prompts[{i}].{name}", f"the cascade has {len(tiers)} tiers, not {count}")
    refused = _of_all_or_none(prompts, len(tiers), at, "refused")
    return JudgedSample(
        tiers,
        np.maximum(1, np.array([p.input_tokens for p in prompts], np.int64)),
        np.maximum(1, np.array([p.output_tokens for p in prompts], np.int64)),
        np.array([p.judge_scores for p in prompts], float),
        _of_all_or_none(prompts, len(tiers), at, "predicted_scores"),
        parts=_unfinished(judged, len(tiers), at),
        known_quality=_of_all_or_none(prompts, len(tiers), at, "qualities"),
        refused=None if refused is None else refused > 0,
    )


def _of_all_or_none(prompts: Sequence[JudgedPrompt], tiers: int, at: str, name: str) -> Floats | None:
    """(N, C) values that all prompts have, or None if none has; InvalidRequest naming the field."""
    rows = [getattr(prompt, name) for prompt in prompts]
    for i, row in enumerate(rows):
        if len(row) not in (0, tiers):
            raise invalid(f"{at}.prompts[{i}].{name}", f"the cascade has {tiers} tiers, not {len(row)}")
        if bool(row) != bool(rows[0]):
            raise invalid(f"{at}.prompts[{i}].{name}", "all prompts must have them or none")
    return np.array(rows, float) if rows[0] else None


def _unfinished(judged: JudgedPrompts, tiers: int, at: str) -> PartScores | None:
    """The scores of unfinished answers; None without any. InvalidRequest naming the field."""
    after = judged.early_after_tokens
    if len(after) > MAX_EARLY_CHECKS or any(a >= b for a, b in pairwise(after)):
        raise invalid(f"{at}.early_after_tokens", f"must be {MAX_EARLY_CHECKS} numbers of tokens at most, ascending")
    scores = np.full((len(judged.prompts), tiers, len(after)), np.nan)
    for i, prompt in enumerate(judged.prompts):
        here = f"{at}.prompts[{i}].unfinished_scores"
        if len(prompt.unfinished_scores) != (tiers if after else 0):
            needed = f"the cascade has {tiers} tiers" if after else "there are no early_after_tokens"
            raise invalid(here, f"{needed}, not {len(prompt.unfinished_scores)}")
        for tier, part in enumerate(prompt.unfinished_scores):
            if len(part) > len(after):
                raise invalid(f"{here}[{tier}]", f"there are {len(after)} early_after_tokens, not {len(part)}")
            if any(score < 0 or score > 100 for score in part):  # NaN where there is none
                raise invalid(f"{here}[{tier}]", "must be from 0 to 100")
            whole = prompt.output_tokens[tier]
            if part and after[len(part) - 1] >= max(1, whole):
                problem = f"there is one after {after[len(part) - 1]} tokens of an answer that has {whole}"
                raise invalid(f"{here}[{tier}]", problem)
            scores[i, tier, : len(part)] = part
    return PartScores(after, scores) if after else None
