"""The few layouts that are worth a replay. No I/O.

The partition (`partition`) knows costs per output token of the sequences in flight, and neither queues nor bursts. So it only
proposes: its best layout, those that it finds best where a move costs more (they have fewer stages), and each of these with
its instances shared out by the seconds of work in every stage. What cannot hold its KV or carry its moves is left out.
"""

from collections.abc import Iterator

import numpy as np

from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.simulator.cluster import Moves
from penstock.planner_service.simulator.workload import Floats
from penstock.planner_service.stages.partition import Problem, exponential_cuts
from penstock.planner_service.stages.profile import prompt_s
from penstock.planner_service.stages.sample import LengthSample
from penstock.services.domain.latency import StepLoad
from penstock.services.domain.shares import apportioned
from penstock.services.domain.stages.layout import StageLayout
from penstock.types.plans import QoeModel, Stage

MOVE_FACTORS = (1.0, 10.0, 100.0, 1000.0)
"""What a move is taken to cost, in multiples: each makes the partition propose fewer stages."""
KV_SHARE = 0.9
"""Of its KV that a stage may fill with the sequences in flight: what is more waits or is preempted."""
TRANSFER_SHARE = 0.5
"""Of the bandwidth between two stages that their moves may take: bursts need the rest."""


def propose(
    work: Workload, sample: LengthSample, qoe: QoeModel, replica: Replica, instances: int, max_tokens: int, moves: Moves
) -> list[StageLayout]:
    """Layouts of several stages that fit, the most promising first; none of them twice."""
    problem = Problem(sample, qoe, instances, moves, exponential_cuts(max_tokens))
    layouts = dict[StageLayout, None]()
    for best in _by_move_cost(problem):
        for layout in (best, balanced(best, work, replica)):
            if len(layout.stages) > 1 and fits(layout, work, sample, replica, moves):
                layouts[layout] = None
    return list(layouts)


def _by_move_cost(problem: Problem) -> Iterator[StageLayout]:
    crossing = problem.crossing.copy()
    for factor in MOVE_FACTORS:
        problem.crossing = crossing * factor
        yield problem.layout(problem.exact())


def balanced(layout: StageLayout, work: Workload, replica: Replica) -> StageLayout:
    """The same ranges, with the instances in proportion to the work in each of them (largest remainder, one at least)."""
    seconds = stage_seconds(layout, work, replica)
    counts = apportioned(layout.instances - len(layout.stages), seconds.tolist())
    return StageLayout(
        tuple(Stage(s.from_tokens, s.to_tokens, 1 + n) for s, n in zip(layout.stages, counts, strict=True))
    )


def stage_seconds(layout: StageLayout, work: Workload, replica: Replica) -> Floats:
    """(S) seconds of work of a workload in each stage: prompts where they begin, tokens where they are generated.

    A token takes its part of a step of a full chunk, and the reading of its context.
    """
    latency, chunk = replica.latency, replica.limits.max_step_tokens
    token_s = latency.step_s(StepLoad(chunk, 0, requests=1)) / chunk
    seconds = np.zeros(len(layout.stages))
    first = np.searchsorted(layout.cuts, work.input_tokens, side="right")
    prompts = {int(n): prompt_s(latency, int(n), chunk) for n in np.unique(work.input_tokens)}
    np.add.at(seconds, first, [prompts[int(n)] for n in work.input_tokens])
    final = work.input_tokens + work.output_tokens
    for i, stage in enumerate(layout.stages):
        end = np.inf if i == len(layout.stages) - 1 else stage.to_tokens
        low, high = np.maximum(work.input_tokens, stage.from_tokens), np.minimum(final, end)
        tokens = np.maximum(0, high - low)
        seconds[i] += float((tokens * (token_s + latency.context_token_s * (low + high) / 2)).sum())
    return seconds


def fits(layout: StageLayout, work: Workload, sample: LengthSample, replica: Replica, moves: Moves) -> bool:
    """Whether every stage has the KV for its sequences in flight, and every cut the bandwidth for its moves."""
    stage_of = np.searchsorted(layout.cuts, sample.tokens, side="right")
    held = np.bincount(stage_of, weights=sample.tokens, minlength=len(layout.stages))
    room = np.array([stage.instances * replica.lane_tokens for stage in layout.stages])
    if (held > KV_SHARE * room).any():
        return False
    final = work.input_tokens + work.output_tokens
    for before, after in zip(layout.stages, layout.stages[1:], strict=False):
        cut = after.from_tokens
        moved = float(((work.input_tokens < cut) & (final >= cut)).mean()) * work.rate_per_s
        pairs = min(before.instances, after.instances)  # an instance sends and receives one after the other
        if moved * cut * moves.token_s > TRANSFER_SHARE * pairs:
            return False
    return True
