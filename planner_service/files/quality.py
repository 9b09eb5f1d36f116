"""Judged prompts of a question, as routing has them."""

from collections.abc import Sequence

import numpy as np

from penstock.planner_service.question.site import Site, with_drafts
from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.simulator.workload import Floats
from penstock.services.domain.errors import check, invalid
from penstock.types.planning import JudgedPrompt, JudgedPrompts
from penstock.types.ranges import range_problems


def judged_of(judged: JudgedPrompts, tiers: tuple[str, ...]) -> JudgedSample:
    """An empty prompt or answer counts as one token: it costs a step to find out.

    Raises:
        InvalidRequest: A field is unsound; named from `quality` on.
    """
    prompts = judged.prompts
    if not prompts:
        raise invalid("quality.prompts", "no prompts")
    check(range_problems(judged, "quality"))
    for name in ("output_tokens", "judge_scores"):
        for i, prompt in enumerate(prompts):
            if len(getattr(prompt, name)) != len(tiers):
                count = len(getattr(prompt, name))
                raise invalid(f"quality.prompts[{i}].{name}", f"the cascade has {len(tiers)} tiers, not {count}")
    refused = _of_all_or_none(prompts, len(tiers), "refused")
    return JudgedSample(
        tiers,
        np.maximum(1, np.array([p.input_tokens for p in prompts], np.int64)),
        np.maximum(1, np.array([p.output_tokens for p in prompts], np.int64)),
        np.array([p.judge_scores for p in prompts], float),
        _of_all_or_none(prompts, len(tiers), "predicted_scores"),
        known_quality=_of_all_or_none(prompts, len(tiers), "qualities"),
        refused=None if refused is None else refused > 0,
    )


def judged_for(judged: JudgedPrompts, site: Site) -> JudgedSample:
    """The judged prompts of a question, with what rejected answers are as drafts there.

    Raises:
        InvalidRequest: As judged_of.
    """
    return with_drafts(judged_of(judged, site.tiers), site)


def _of_all_or_none(prompts: Sequence[JudgedPrompt], tiers: int, name: str) -> Floats | None:
    """(N, C) values that all prompts have, or None if none has; InvalidRequest naming the field."""
    rows = [getattr(prompt, name) for prompt in prompts]
    for i, row in enumerate(rows):
        if len(row) not in (0, tiers):
            raise invalid(f"quality.prompts[{i}].{name}", f"the cascade has {tiers} tiers, not {len(row)}")
        if bool(row) != bool(rows[0]):
            raise invalid(f"quality.prompts[{i}].{name}", "all prompts must have them or none")
    return np.array(rows, float) if rows[0] else None
