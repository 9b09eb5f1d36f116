"""Plans, and what the planner and the simulator report. Times are in seconds."""

from dataclasses import dataclass

from penstock.types.plans import Plan as Plan
from penstock.types.plans import Prediction as Prediction
from penstock.types.plans import QoeModel as QoeModel
from penstock.types.plans import Stage as Stage
from penstock.types.plans import TierPlan as TierPlan
from penstock.types.rules import LongAnswers as LongAnswers
from penstock.types.rules import SkipFor as SkipFor


@dataclass(frozen=True, slots=True)
class SequenceInFlight:
    """A sequence in flight. tokens: input and output so far. output_tokens: at its end; 0 if unknown."""

    input_tokens: int
    tokens: int
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StagesVerdict:
    """What a replay of stages showed. The changes are shares of what they were held against; negative is less.

    use_stages: whether the response has several stages. replayed_count: layouts that were replayed. judged: the best of them,
        empty if none holds its KV and carries its moves. favoured: whether it is better than what it was held against.
    """

    use_stages: bool
    ttft_p50_change: float
    ttft_p95_change: float
    tpot_change: float
    sustained_rate_change: float
    sentence: str
    replayed_count: int
    judged: tuple[Stage, ...]
    favoured: bool


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Stages and their total QoE (lower is better), compared with one stage and with one instance per stage.

    chain_quality: of one instance per stage; None if there are more instances than ranges.
    gap: relative distance to the least quality. plan: the published plan, if it was published.
    verdict: None where nothing was replayed. qoe: the model by which the stages were planned.
    """

    stages: tuple[Stage, ...]
    quality: float
    one_stage_quality: float
    chain_quality: float | None
    gap: float
    elapsed_seconds: float
    plan: Plan | None = None
    verdict: StagesVerdict | None = None
    qoe: QoeModel | None = None
