"""Judged prompts: what each tier answered and what its answers are worth."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.early_checks import PartScores
from planner_service.routing.quality import JudgedSample
from planner_service.simulator.workload import MAX_TOKENS, Floats
from services.domain.early_checks import MAX_EARLY_CHECKS
from services.domain.errors import invalid


def judged_from_proto(workload: pb.Workload, tiers: tuple[str, ...], at: str) -> JudgedSample:
    if not workload.judged:
        raise invalid(at, "no prompts")
    for i, prompt in enumerate(workload.judged):
        for name, values in (("output_tokens", prompt.output_tokens), ("judge_scores", prompt.judge_scores)):
            if len(values) != len(tiers):
                raise invalid(f"{at}[{i}].{name}", f"the cascade has {len(tiers)} tiers, not {len(values)}")
        if not all(0 <= score <= 100 for score in prompt.judge_scores):
            raise invalid(f"{at}[{i}].judge_scores", "must be from 0 to 100")
        counts = {"input_tokens": prompt.input_tokens}
        counts |= {f"output_tokens[{tier}]": count for tier, count in enumerate(prompt.output_tokens)}
        for name, count in counts.items():
            if count > MAX_TOKENS:
                raise invalid(f"{at}[{i}].{name}", f"must be at most {MAX_TOKENS:,}, not {count:,}")
    parts = _unfinished(workload, len(tiers), at)
    refused = _of_all_or_none([p.refused for p in workload.judged], len(tiers), at, "refused")
    # an empty prompt or answer counts as one token, as in files
    return JudgedSample(
        tiers,
        np.maximum(1, np.array([p.input_tokens for p in workload.judged], np.int64)),
        np.maximum(1, np.array([p.output_tokens for p in workload.judged], np.int64)),
        np.array([p.judge_scores for p in workload.judged], float),
        _of_all_or_none([p.predicted_scores for p in workload.judged], len(tiers), at, "predicted_scores"),
        parts=parts,
        known_quality=_of_all_or_none([p.qualities for p in workload.judged], len(tiers), at, "qualities"),
        refused=None if refused is None else refused > 0,
    )


def _of_all_or_none(rows: Sequence[Sequence[float]], tiers: int, at: str, name: str) -> Floats | None:
    """(N, C) values from 0 to 100 that all prompts have, or None if none has; InvalidRequest naming the field."""
    for i, row in enumerate(rows):
        if len(row) not in (0, tiers):
            raise invalid(f"{at}[{i}].{name}", f"the cascade has {tiers} tiers, not {len(row)}")
        if bool(row) != bool(rows[0]):
            raise invalid(f"{at}[{i}].{name}", "all prompts must have them or none")
        if not all(0 <= value <= 100 for value in row):
            raise invalid(f"{at}[{i}].{name}", "must be from 0 to 100")
    return np.array(rows, float) if rows[0] else None


def _unfinished(workload: pb.Workload, tiers: int, at: str) -> PartScores | None:
    """The scores of unfinished answers; None without any. InvalidRequest naming the field."""
    after = tuple(workload.early_after_tokens)
    if len(after) > MAX_EARLY_CHECKS or (after and after[0] < 1) or any(a >= b for a, b in pairwise(after)):
        raise invalid(
            "inputs.workload.early_after_tokens",
            f"must be {MAX_EARLY_CHECKS} numbers of tokens at most, from 1 on, ascending",
        )
    scores = np.full((len(workload.judged), tiers, len(after)), np.nan)
    for i, prompt in enumerate(workload.judged):
        if len(prompt.unfinished) != (tiers if after else 0):
            needed = f"the cascade has {tiers} tiers" if after else "the workload has no early_after_tokens"
            raise invalid(f"{at}[{i}].unfinished", f"{needed}, not {len(prompt.unfinished)}")
        for tier, part in enumerate(prompt.unfinished):
            here = f"{at}[{i}].unfinished[{tier}].scores"
            if len(part.scores) > len(after):
                raise invalid(here, f"there are {len(after)} early_after_tokens, not {len(part.scores)}")
            if not all(0 <= score <= 100 for score in part.scores):
                raise invalid(here, "must be from 0 to 100")
            if part.scores and after[len(part.scores) - 1] >= max(1, prompt.output_tokens[tier]):
                whole = prompt.output_tokens[tier]
                raise invalid(
                    here, f"there is one after {after[len(part.scores) - 1]} tokens of an answer that has {whole}"
                )
            scores[i, tier, : len(part.scores)] = part.scores
    return PartScores(after, scores) if after else None
