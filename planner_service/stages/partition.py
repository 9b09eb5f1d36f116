"""Splits instances into length stages (CascadeInfer, section 4.2). No I/O.

Given: E instances, sequences in flight, a QoE model, what a move costs. Wanted: stages, each a range of lengths and a number
of instances, the ranges covering [0, max_tokens), the instances adding up to E. Least: the total QoE of all instances, each
with an even share of its stage's sequences, plus c[l] for every cut l. Cuts are at exponential bucket bounds.

An even share of a set on k instances has the k-th part of its sums. The paper samples it, every k-th sequence (`even_share`);
a search for the least over all k then finds those k whose samples happen to be light, most of all in small sets.
"""

from dataclasses import dataclass, replace

import numpy as np

from penstock.planner_service.simulator.cluster import Moves
from penstock.planner_service.simulator.workload import Floats, Ints
from penstock.planner_service.stages import kernel
from penstock.planner_service.stages.sample import LengthSample
from penstock.services.domain.errors import invalid
from penstock.services.domain.stages.layout import StageLayout
from penstock.types.plans import QoeModel, Stage

CUTS_PER_DOUBLING = 2


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A layout and its total QoE, and that of one stage; the less the better. gap: how far quality lies above the least one,
    relative."""

    layout: StageLayout
    quality: float
    one_stage_quality: float
    gap: float = 0.0


Part = tuple[int, int, int]  # a stage: from and to which cut point, on how many instances


class Problem:
    """One partition problem: cut points, and the cost of every possible stage."""

    def __init__(self, sample: LengthSample, qoe: QoeModel, instances: int, moves: Moves, cut_points: Ints) -> None:
        if instances < 1:
            raise invalid("instances", "must be at least 1")
        if sample.tokens[-1] >= cut_points[-1]:
            raise invalid("max_tokens", f"must exceed the longest sequence, {sample.tokens[-1]} tokens")
        self.instances, self.cut_points = instances, cut_points
        self.ends = np.searchsorted(sample.tokens, cut_points).astype(np.int64)
        self.quality = kernel.stage_qualities(
            sample.tokens.astype(np.float64),
            sample.input_tokens.astype(np.float64),
            self.ends,
            instances,
            np.array(qoe.coefficients),
        )
        self.crossing = _crossing(sample, cut_points, moves)

    def total(self, parts: list[Part]) -> float:
        """Pipeline quality of stages given in order."""
        held = sum(float(self.quality[a, b, k]) for a, b, k in parts)
        return held + sum(float(self.crossing[a]) for a, _, _ in parts[1:])

    def exact(self) -> list[Part]:
        """The best of all layouts."""
        shape = (self.instances + 1, len(self.cut_points))
        best, before, cut = np.empty(shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        kernel.partition(self.quality, self.crossing, best, before, cut)
        parts, e, b = list[Part](), self.instances, len(self.cut_points) - 1
        while b > 0:
            parts.append((int(cut[e, b]), b, e - int(before[e, b])))
            e, b = int(before[e, b]), int(cut[e, b])
        return parts[::-1]

    def layout(self, parts: list[Part]) -> StageLayout:
        points = self.cut_points
        return StageLayout(tuple(Stage(int(points[a]), int(points[b]), k) for a, b, k in parts))


def exponential_cuts(max_tokens: int, per_doubling: int = CUTS_PER_DOUBLING) -> Ints:
    """(C) 0, the bounds of exponentially growing buckets, and max_tokens."""
    if max_tokens < 1:
        raise invalid("max_tokens", "must be at least 1")
    powers = np.arange(0, per_doubling * int(np.ceil(np.log2(max_tokens))) + 1) / per_doubling
    points = np.unique(np.round(2.0**powers).astype(np.int64))
    return np.concatenate([[0], points[points < max_tokens], [max_tokens]])


def plan_stages(sample: LengthSample, qoe: QoeModel, instances: int, max_tokens: int, moves: Moves) -> StagePlan:
    """The layout of least total QoE for these sequences. Deterministic.

    Raises:
        InvalidRequest: no instance, or a sequence that does not fit max_tokens.
    """
    problem = Problem(sample, qoe, instances, moves, exponential_cuts(max_tokens))
    parts = problem.exact()
    return StagePlan(
        problem.layout(parts), problem.total(parts), problem.total([(0, len(problem.cut_points) - 1, instances)])
    )


def with_layout(
    plan: StagePlan, layout: StageLayout | None, sample: LengthSample, qoe: QoeModel, moves: Moves
) -> StagePlan:
    """The plan with another layout, which the partition did not find best; with one stage if there is none."""
    chosen = layout or StageLayout.single(plan.layout.instances, plan.layout.max_tokens)
    if chosen == plan.layout:
        return plan
    quality = layout_quality(chosen, sample, qoe, moves)
    return replace(plan, layout=chosen, quality=quality, gap=max(0.0, quality / plan.quality - 1))


def layout_quality(layout: StageLayout, sample: LengthSample, qoe: QoeModel, moves: Moves) -> float:
    """The total QoE of any layout, as that of `plan_stages`."""
    cut_points = np.array([0, *layout.cuts, layout.max_tokens], np.int64)
    problem = Problem(sample, qoe, layout.instances, moves, cut_points)
    return problem.total([(i, i + 1, stage.instances) for i, stage in enumerate(layout.stages)])


def _crossing(sample: LengthSample, cut_points: Ints, moves: Moves) -> Floats:
    """(C) c[l]: seconds per output token that moves at each cut add, summed over the sequences.

    A request whose length passes l moves l tokens of KV once; its cost being time per output token, the move's time is
    spread over its output. This counts the whole transfer as delay: an upper bound where moves are live.
    """
    final = sample.input_tokens + sample.output_tokens
    crossing = np.zeros(len(cut_points))
    for i, cut in enumerate(cut_points):
        passes = (sample.input_tokens < cut) & (final >= cut)
        crossing[i] = cut * moves.token_s * (1.0 / sample.output_tokens[passes]).sum()
    return crossing
