"""Which latency is meant: of a cascade as its users feel it, and what each tier adds to it. No I/O.

This is the one definition. The simulation of a whole cascade, the estimates of a search and the bounds of what can be
proved all call `felt_s`, with times that they found in their own ways.
"""

import enum
import math
from dataclasses import dataclass

import numpy as np

from penstock.planner_service.simulator.workload import Bools, Floats, Ints
from penstock.types.planning import Objective


class Measured(enum.IntEnum):
    """What a tier's latency is measured by, by its number in `kernel`."""

    LATENCY = 0  # from arrival to last token
    FIRST_TOKEN = 1  # from arrival to first token
    PACE = 2  # per token after the first


WORDS = {
    Objective.LARGEST_TIER: "latency of the slowest tier",
    Objective.END_TO_END: "end-to-end latency",
    Objective.FIRST_TOKEN: "time to the first visible token",
    Objective.PACE: "time per output token",
}


def latency_words(objective: Objective, percentile: float) -> str:
    """`p99 time to the first visible token`."""
    return f"p{percentile:g} {WORDS[objective]}"


def measured_at(objective: Objective, *, streamed: bool) -> Measured:
    """What a tier adds to the objective's latency. streamed: whether its answers are, and not held."""
    if objective is Objective.PACE:
        return Measured.PACE
    return Measured.FIRST_TOKEN if streamed and objective is Objective.FIRST_TOKEN else Measured.LATENCY


@dataclass(frozen=True, slots=True, eq=False)
class Replies:
    """answered (N): the tier whose answer is the reply. held (N): whether it is judged first, and not streamed.
    output_tokens (N, C): of each tier's answers."""

    answered: Ints
    held: Bools
    output_tokens: Ints


def felt_s(objective: Objective, replies: Replies, total_s: Floats, written_s: Floats) -> Floats:
    """(N) the latency of each request; (M) for the pace, of the M replies with several tokens.

    total_s (N): from arrival to final answer. written_s (C, N): from the first to the last token of each tier's answer.
    """
    rows = np.arange(len(total_s))
    if objective is Objective.FIRST_TOKEN:
        return np.asarray(total_s - np.where(replies.held, 0.0, written_s[replies.answered, rows]))
    if objective is Objective.PACE:
        later = replies.output_tokens[rows, replies.answered] - 1
        many = later > 0
        return np.asarray(written_s[replies.answered, rows][many] / later[many])
    return total_s


def percentile_s(seconds: Floats, percentile: float) -> float:
    """The percentile of (N) seconds; 0 for none, as where every answer has one token and so no pace."""
    return float(np.percentile(seconds, percentile)) if len(seconds) else 0.0


def least_requests(percentile: float) -> int:
    """The fewest requests of which this percentile is not simply the slowest one."""
    return math.ceil(100.0 / (100.0 - percentile) - 1e-9)
