"""Drafts in steps with promised SLOs: how long they may be so that every promise is kept even if nothing of them stands.
No I/O.

A step with drafts takes longer: its pass has more rows, and drafting itself takes time. That time is taken only where no
token of the step is late because of it, and where the certificate of admission, replayed from the later end on, still passes
with KV for every drafted token set aside. Drafts that stand only bring forward what the certificate expects: a reply is ahead
by no more than was drafted for it, and so holds no more KV than that besides.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from services.domain.latency import StepLatencyModel
from services.domain.slo.compiled.layout import CONTEXT, DUE_S, KIND, STANDARD, TPOT_S, StepModel
from services.domain.slo.compiled.table import Snapshot, decide
from services.domain.slo.draft_windows import DraftPace, PacedDecode, longest_windows


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that the table has planned.

    ends_s: when it ends without drafts. after: the columns as they will be when it ends at a given time. due_s: by request,
    when the tokens are due that it yields under a promise. tokens: that it computes. limits: by request, how many tokens the
    step's budget and the reply leave for drafts. kv_tokens, partial_tokens: as in `decide`, for the requests of `after`.
    """

    ends_s: float
    after: Callable[[float], Snapshot]
    due_s: Mapping[str, float]
    tokens: int
    limits: Mapping[str, int]
    kv_tokens: int
    partial_tokens: int


@dataclass(frozen=True, slots=True)
class AllowedDrafts:
    """windows: how many tokens may be drafted, by request; only requests for which any may be. kv_tokens: the most KV that
    the promised requests of the step hold at any time with them."""

    windows: Mapping[str, int]
    kv_tokens: float


NO_DRAFTS = AllowedDrafts({}, 0.0)


def allowed_windows(
    step: PlannedStep,
    pace: DraftPace,
    latency: StepLatencyModel,
    model: StepModel,
    *,
    correction: float,
    prompts_wait: bool,
) -> AllowedDrafts:
    """How many tokens may be drafted in the step.

    latency: of a step. model: the same times `correction`, for compiled code. prompts_wait: as in `longest_windows`.
    """
    after = step.after(step.ends_s)
    columns = {name: at for at, name in enumerate(after.ids)}
    able = [name for name in step.limits if name in step.due_s and name in columns]
    if not able:
        return NO_DRAFTS
    windows = longest_windows(
        [PacedDecode(float(after.times[TPOT_S, columns[name]]), step.ends_s - step.due_s[name]) for name in able],
        pace,
        corrected(latency, correction),
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
        held = _certified_kv(step, extra_s, rows, model)
        if math.isfinite(held):
            allowed = {name: min(window, longest) for name, window in most.items() if window > 0}
            return AllowedDrafts(allowed, held + rows)
        longest //= 2
    return NO_DRAFTS


def verifying_s(latency: StepLatencyModel, correction: float, tokens: int, rows: int) -> float:
    """By how much a step of so many tokens takes longer with `rows` drafted ones."""
    return correction * (latency.base_s(tokens + rows) - latency.base_s(tokens))


def corrected(latency: StepLatencyModel, factor: float) -> StepLatencyModel:
    """The model with all its seconds times `factor`."""
    return StepLatencyModel(
        latency.knot_tokens,
        tuple(seconds * factor for seconds in latency.knot_s),
        latency.context_token_s * factor,
        latency.pair_s * factor,
        latency.gap_s * factor,
    )


def _certified_kv(step: PlannedStep, extra_s: float, rows: int, model: StepModel) -> float:
    """The most KV that promised requests hold at any time if the step takes so much longer and none of its `rows` drafted
    tokens stands; infinite where a token that is in time without drafts is late, or where no KV is left for the drafts."""
    ends_s = step.ends_s + extra_s
    if rows > step.kv_tokens or any(step.ends_s <= due_s < ends_s for due_s in step.due_s.values()):
        return math.inf
    after = step.after(ends_s)
    # What is late anyway cannot be kept any more: its pace is, from now on.
    late = (after.counts[KIND] == STANDARD) & (after.times[DUE_S] < step.ends_s)
    after.times[DUE_S] = np.where(late, ends_s + after.times[TPOT_S], after.times[DUE_S])
    kv_tokens = step.kv_tokens - rows
    return decide(
        ends_s, after, [], model, kv_tokens=kv_tokens, partial_tokens=step.partial_tokens, free_places=0
    ).kv_tokens
