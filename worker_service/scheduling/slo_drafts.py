"""Drafts in steps with promised SLOs: how long they may be so that every promise is kept even if nothing of them is accepted.
No I/O.

A step with drafts takes longer: its pass has more rows, and drafting itself takes time. That time is taken only where no
token of the step is late because of it, and where the certificate of admission, replayed from the later end on, still passes
with KV for every drafted token set aside. Drafts that are accepted change what follows, so they come only where a replay
with them passes, too (`certified_step.may_end_s`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.slo.compiled.layout import CONTEXT, TPOT_S, StepModel
from penstock.services.domain.slo.compiled.table import Snapshot
from penstock.services.domain.slo.draft_windows import DraftPace, longest_windows, tightened_pace


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that the table has planned.

    ends_s: when it ends without drafts. after: the columns as they will be then. due_s: by request, when the tokens are due
    that it yields under a promise. tokens: that it computes. limits: by request, how many tokens the step's budget and the
    reply leave for drafts. may_end: whether all promises are kept if it ends at a given time, with KV for so many tokens set
    aside, and none of its drafts is accepted.
    """

    ends_s: float
    after: Snapshot
    due_s: Mapping[str, float]
    tokens: int
    limits: Mapping[str, int]
    may_end: Callable[[float, int], bool]


def allowed_windows(
    step: PlannedStep,
    pace: DraftPace,
    latency: StepLatencyModel,
    model: StepModel,
    *,
    correction: float,
    prompts_wait: bool,
) -> Mapping[str, int]:
    """How many tokens may be drafted in the step, by request; only requests for which any may be.

    latency: of a step. model: the same times `correction`, for compiled code. prompts_wait: as in `longest_windows`.
    """
    after = step.after
    columns = {name: at for at, name in enumerate(after.ids)}
    able = [name for name in step.limits if step.due_s.get(name, math.inf) < math.inf and name in columns]
    if not able:
        return {}
    windows = longest_windows(
        [tightened_pace(float(after.times[TPOT_S, columns[name]]), step.ends_s - step.due_s[name]) for name in able],
        pace,
        latency.scaled(correction),
        context_tokens=int(after.counts[CONTEXT][[columns[name] for name in able]].sum()),
        max_step_tokens=model.max_step_tokens,
        max_window=max(step.limits[name] for name in able),
        prompts_wait=prompts_wait,
    )
    most = {name: min(step.limits[name], window) for name, window in zip(able, windows, strict=True)}
    longest = max(most.values())
    while longest > 0:
        rows = sum(min(window, longest) for window in most.values())
        extra_s = verifying_s(latency, correction, step.tokens, rows) + pace.step_s * longest
        if step.may_end(step.ends_s + extra_s, rows):
            return {name: min(window, longest) for name, window in most.items() if window > 0}
        longest //= 2
    return {}


def verifying_s(latency: StepLatencyModel, correction: float, tokens: int, rows: int) -> float:
    """By how much a step of so many tokens takes longer with `rows` drafted ones."""
    return correction * (latency.base_s(tokens + rows) - latency.base_s(tokens))
