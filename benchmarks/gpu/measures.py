"""What is measured of an engine: step times, what mixed lengths cost, and the forecast of a replay. No I/O of its own."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.subjects import Subject
from benchmarks.held_out_fit import fit_held_out
from benchmarks.simulator import Sample, figures_of
from penstock.planner_service.files.profiles import Profile
from penstock.planner_service.simulator import Replica, Served, Workload, serve
from penstock.services.domain.errors import invalid
from penstock.services.domain.latency_fit import mean_error

LOADS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of what the simulator says that the replica can serve
LONG_SHARES = (0.02, 0.05, 0.1, 0.25)  # of the sequences of a mixed batch that are long
BATCHES = (8, 32, 128)  # sequences of a mixed batch
LEAST_SAMPLES = 50  # of a profile
MIXED_TURNS = 2
REPLAY_S = 12.0  # that a replay lasts, at its rate
LEAST_REQUESTS, MOST_REQUESTS = 40, 2000  # of a replay


class TimeBudget:
    """Seconds for a command. A stage gets a share of what is left; a stage whose time is over starts nothing new."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = now() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - self._now())

    def stage(self, share: float) -> "TimeBudget":
        """A budget of its own for a stage."""
        return TimeBudget(share * self.left_s, self._now)

    @property
    def over(self) -> bool:
        return self.left_s <= 0


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """Sequences of two lengths, and as many of one length with the same number of tokens in all, up to rounding."""

    count: int
    long_share: float
    mixed: tuple[int, ...]
    uniform: tuple[int, ...]


def mixed_batches(shape: Shape, room_tokens: int, most: int) -> list[MixedBatch]:
    """The mixed batches that fit into `room_tokens` of KV and `most` sequences. At least one sequence of each is long."""
    batches = list[MixedBatch]()
    for count in BATCHES:
        for share in LONG_SHARES:
            long = max(1, round(share * count))
            mixed = (shape.long,) * long + (shape.short,) * (count - long)
            total = sum(mixed)
            # as long a reply as the first sequence makes until the last prompt is computed
            growth = count * (2 * (total // max(1, shape.max_step_tokens - count) + count) + 64)
            if count > most or total + growth > room_tokens or any(mixed == b.mixed for b in batches):
                continue
            batches.append(MixedBatch(count, long / count, mixed, _spread(total, count)))
    return batches


def _spread(total: int, count: int) -> tuple[int, ...]:
    """`count` lengths that differ by at most one and sum to `total`."""
    each, more = divmod(total, count)
    return (each + 1,) * more + (each,) * (count - more)


def mixed_lengths(
    subject: Subject, shape: Shape, replica: Replica, seed: int, budget: TimeBudget
) -> list[dict[str, Any]]:
    """Decode steps of mixed batches over those of uniform ones with as many tokens (CascadeInfer, figure 2).

    Both are measured MIXED_TURNS times in turns, and the shortest counts: what holds a step up only makes it longer.
    """
    rows = list[dict[str, Any]]()
    for batch in mixed_batches(shape, replica.lane_tokens, replica.limits.max_running):
        if budget.over:
            break
        uniform, mixed = list[float](), list[float]()
        for turn in range(MIXED_TURNS):
            for lengths, times in ((batch.uniform, uniform), (batch.mixed, mixed)):
                if (step_s := subject.decode_step_s(lengths, seed + turn)) is not None:
                    times.append(step_s)
        uniform_s, mixed_s = min(uniform, default=None), min(mixed, default=None)
        row = {
            "batch": batch.count,
            "short": shape.short,
            "long": shape.long,
            "long_share": batch.long_share,
            "tokens": sum(batch.mixed),
            "uniform_s": uniform_s,
            "mixed_s": mixed_s,
            "ratio": mixed_s / uniform_s if mixed_s and uniform_s else None,
        }
        rows.append(row)
    return rows


def profiled(subject: Subject, about: tuple[str, str], samples: Sequence[Sample]) -> Profile:
    """The planner's profile of an engine, a fifth of the samples held out. about: model and machine.

    Raises:
        InvalidRequest: There are fewer samples than LEAST_SAMPLES, or than coefficients.
    """
    if len(samples) < LEAST_SAMPLES:
        raise invalid("samples", f"must be at least {LEAST_SAMPLES}, not {len(samples)}")
    latency, fitted, held_out_error = fit_held_out(samples)
    model, machine = about
    replica = subject.replica(latency)
    return Profile(model, subject.name, machine, replica, tuple(samples), mean_error(latency, fitted), held_out_error)


def replay_work(shape: Shape, replica: Replica, load: float, seed: int) -> Workload:
    """Requests at a share of what the replica can serve: Poisson arrivals, uniform lengths."""
    draw = np.random.default_rng([seed, round(100 * load)])
    (p0, p1), (o0, o1) = shape.prompt, shape.output
    rate = load * replica.capacity_per_s((p0 + p1) / 2, (o0 + o1) / 2)
    count = int(np.clip(rate * REPLAY_S, LEAST_REQUESTS, MOST_REQUESTS))
    arrival_s = np.cumsum(draw.exponential(1 / rate, count))
    return Workload(arrival_s - arrival_s[0], draw.integers(p0, p1, count), draw.integers(o0, o1, count))


def forecasts(
    replay: Callable[[Workload, int], Served], shape: Shape, replica: Replica, seed: int, budget: TimeBudget
) -> list[dict[str, Any]]:
    """By load: what the engine did, what the simulator says of the same requests, and the relative errors.

    replay: serves a workload on the engine, with prompts drawn by a seed.
    """
    rows = list[dict[str, Any]]()
    for load in LOADS:
        work = replay_work(shape, replica, load, seed)
        if budget.left_s < float(work.arrival_s[-1]):
            break
        measured = figures_of(work, replay(work, seed))
        predicted = figures_of(work, serve(work, [replica]))
        rows.append(
            {
                "load": load,
                "rate_per_s": work.rate_per_s,
                "requests": len(work),
                "measured": measured,
                "forecast": predicted,
                "error": {name: predicted[name] / value - 1 if value else None for name, value in measured.items()},
            }
        )
    return rows
