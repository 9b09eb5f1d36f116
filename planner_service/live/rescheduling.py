"""When a workload has drifted from what a plan was made for (CASCADIA, section 4.4). Pure rule: windows in, decisions out.

Compared are the rate of arrivals, the lengths (mean logarithms of input and output tokens) and the difficulty (mean judge
score). Of output tokens and scores only those of tiers count that nearly every request visits: who else is seen at a tier
depends on the thresholds, not on the workload.

Hysteresis, against noise and against flapping:
- a window is *off* where a figure differs from the reference's by more than both what matters (`CHANGE`, `SCORE_CHANGE`) and
  what noise explains (`STANDARD_ERRORS`); it is *back* only below half of that;
- drift is declared when `CONFIRM_WINDOWS` windows are off in the same figure and direction with none back between them;
- then the windows that showed it become the reference, and for `COOLDOWN_WINDOWS` windows nothing is declared;
- windows that are back in every figure join the reference, up to `REFERENCE_WINDOWS` of them: slow drift is not learnt away.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.services.domain.workload import Window

RATE = "requests per second"
VISITED_BY_ALL = 0.9  # share of requests
CHANGE, SCORE_CHANGE = math.log1p(0.3), 6.0  # of rates and lengths, logarithmic; of scores, in points
STANDARD_ERRORS = 3.0
CONFIRM_WINDOWS, COOLDOWN_WINDOWS, REFERENCE_WINDOWS = 2, 2, 12
LEAST_RECORDS = 20
"""A figure needs so many requests."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A figure that has drifted: rates per second, geometric mean tokens, mean scores."""

    figure: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.figure} {self.before:.3g} -> {self.after:.3g}"


@dataclass(frozen=True, slots=True)
class Drift:
    """Plan again. evidence: the windows that show what the workload is now."""

    shifts: tuple[Shift, ...]
    evidence: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class DriftState:
    """reference: what the plan is for. suspects: figures that are off, and in how many windows: negative for one that has
    fallen. recent: the windows since the first suspicion."""

    reference: tuple[Window, ...] = ()
    suspects: Mapping[str, int] = field(default_factory=dict)
    recent: tuple[Window, ...] = ()
    cooldown: int = 0


@dataclass(frozen=True, slots=True)
class _Figure:
    """A mean on the scale it is compared on. count: effective number of requests."""

    mean: float
    variance: float
    count: float


def observe(state: DriftState, window: Window) -> tuple[DriftState, Drift | None]:
    """The state after one more window, and the drift that it confirms."""
    if not sum(window.arrivals):  # silence says nothing about what comes after it
        return state, None
    if not state.reference:
        return replace(state, reference=(window,)), None
    before, now = figures(state.reference), figures((window,))
    suspects = {name: windows for name, windows in state.suspects.items() if name in before}
    for name in before.keys() & now.keys():
        a, b = before[name], now[name]
        change = b.mean - a.mean
        # ten parts tell burstiness badly: for the rate, the worse of the two
        va, vb = (max(a.variance, b.variance),) * 2 if name == RATE else (a.variance, b.variance)
        bar = max(
            SCORE_CHANGE if name.startswith("score") else CHANGE,
            STANDARD_ERRORS * math.sqrt(va / a.count + vb / b.count),
        )
        sign = 1 if change > 0 else -1
        known = suspects.get(name, 0)
        same = known * sign > 0
        if abs(change) > bar:
            suspects[name] = known + sign if same else sign
        elif known and (abs(change) < bar / 2 or not same):
            del suspects[name]
    cooldown = max(0, state.cooldown - 1)
    if not suspects:
        reference = state.reference
        if len(reference) < REFERENCE_WINDOWS:
            reference = (*reference, window)
        return DriftState(reference, {}, (), cooldown), None
    recent = (*state.recent, window)[-REFERENCE_WINDOWS:]
    sure = {name: abs(windows) for name, windows in suspects.items() if abs(windows) >= CONFIRM_WINDOWS}
    evidence = recent[-max(sure.values(), default=1) :]
    if not sure or state.cooldown or sum(len(w.records) for w in evidence) < LEAST_RECORDS:
        return DriftState(state.reference, suspects, recent, cooldown), None
    after = figures(evidence)
    shifts = tuple(
        Shift(name, _shown(name, before[name].mean), _shown(name, after[name].mean)) for name in sorted(sure)
    )
    return DriftState(evidence, {}, (), COOLDOWN_WINDOWS), Drift(shifts, evidence)


def figures(windows: Sequence[Window]) -> dict[str, _Figure]:
    """What is compared, over some windows together."""
    arrivals = [count for window in windows for count in window.arrivals]
    total = sum(arrivals)
    # how much burstier than Poisson: in the parts of a window, variance of the counts over their mean
    spread = [_dispersion(window.arrivals) for window in windows if sum(window.arrivals)]
    dispersion = max(1.0, sum(spread) / len(spread)) if spread else 1.0
    seconds = sum(window.seconds for window in windows)
    result = {RATE: _Figure(math.log(max(total, 0.5) / seconds), dispersion, max(total, 0.5))}
    records = [record for window in windows for record in window.records]
    if len(records) < LEAST_RECORDS:
        return result
    result["input tokens"] = _mean((r.weight, math.log(max(1, r.input_tokens))) for r in records)
    whole = sum(record.weight for record in records)
    for tier in {visit.tier for record in records for visit in record.visits}:
        here = [(r, v) for r in records for v in r.visits if v.tier == tier]
        if sum(r.weight for r, _ in here) < VISITED_BY_ALL * whole:
            continue
        result[f"output tokens of {tier}"] = _mean((r.weight, math.log(max(1, v.output_tokens))) for r, v in here)
        judged = [(r.weight, v.score) for r, v in here if v.score is not None]
        if len(judged) >= LEAST_RECORDS and sum(w for w, _ in judged) >= VISITED_BY_ALL * whole:
            result[f"score of {tier}"] = _mean(judged)
    return result


def rate_per_s(windows: Sequence[Window]) -> float:
    return sum(sum(w.arrivals) for w in windows) / sum(w.seconds for w in windows)


def _shown(name: str, mean: float) -> float:
    return mean if name.startswith("score") else math.exp(mean)


def _dispersion(counts: Sequence[int]) -> float:
    return statistics.variance(counts) / statistics.fmean(counts)


def _mean(values: Iterable[tuple[float, float]]) -> _Figure:
    """Of (weight, value)."""
    pairs = list(values)
    whole = sum(w for w, _ in pairs)
    mean = sum(w * x for w, x in pairs) / whole
    variance = sum(w * (x - mean) ** 2 for w, x in pairs) / whole
    return _Figure(mean, variance, whole**2 / sum(w * w for w, _ in pairs))
