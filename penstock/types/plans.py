"""Published plans: the tiers, their instances and the rules by which answers are accepted."""

import enum
from dataclasses import dataclass
from typing import Annotated

from penstock.types.deployments import ReplicaGroup
from penstock.types.limits import MAX_TIERS, AtMost
from penstock.types.ranges import COUNT, NOT_NEGATIVE, SCORE, Within
from penstock.types.rules import PlanRules, TierRules

MAX_STAGES = 1_024  # of one tier; each has at least one instance
MAX_INSTANCES = 100_000
MAX_SHAPES = 64  # of the workers of one tier


@dataclass(frozen=True, slots=True)
class Stage:
    """Instances for sequences of from_tokens to to_tokens - 1 tokens, input and output so far."""

    from_tokens: int
    to_tokens: int
    instances: Annotated[int, COUNT]


@dataclass(frozen=True, slots=True)
class QoeModel:
    """D0 to D4 of `services/domain/stages/qoe.py`, non-negative: batch_s, request_s per request, the others per token or
    squared token of the batch."""

    batch_s: Annotated[float, NOT_NEGATIVE]
    request_s: Annotated[float, NOT_NEGATIVE]
    input_token_s: Annotated[float, NOT_NEGATIVE]
    input_token_squared_s: Annotated[float, NOT_NEGATIVE]
    context_token_s: Annotated[float, NOT_NEGATIVE]

    @property
    def coefficients(self) -> tuple[float, float, float, float, float]:
        """(D0, D1, D2, D3, D4)."""
        own = self.batch_s, self.request_s, self.input_token_s
        return *own, self.input_token_squared_s, self.context_token_s


class JudgeUnavailable(enum.StrEnum):
    """What a router does with an answer that cannot be scored."""

    ESCALATE = "escalate"  # to the last tier: keeps quality, raises cost
    ACCEPT = "accept"  # accept the answer: keeps cost, lowers quality


@dataclass(frozen=True, slots=True)
class TierPlan(TierRules):
    """One tier. threshold: from 0 to 100; None for the last tier, whose answers are always accepted.

    stages: the length stages; without any, every instance serves all lengths. qoe: the QoE model by which stages are planned
    and refined. drafters: the models that draft in its workers, by the mesh file; no plan changes them. replicas: the
    instances by their shapes; of a plan without any, the planner fills in the mesh file's. Empty where it is not the mesh
    that decides, as of endpoints.
    """

    name: str
    model: str
    threshold: Annotated[float | None, SCORE]
    instances: Annotated[int, Within(0, MAX_INSTANCES)]
    stages: Annotated[tuple[Stage, ...], AtMost(MAX_STAGES, "stages")] = ()
    qoe: QoeModel | None = None
    drafters: Annotated[tuple[str, ...], AtMost(MAX_TIERS, "models")] = ()
    replicas: Annotated[tuple[ReplicaGroup, ...], AtMost(MAX_SHAPES, "shapes")] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """The goal of a computed plan and its predicted figures.

    objective: the latency that was minimised. workload_digest: equal for equal workloads. quality: from 0 to 100.
    latency_p95_s: of the slowest tier.
    """

    objective: str
    target: str
    workload_digest: str
    quality: float
    latency_p95_s: float
    end_to_end_p95_s: float


@dataclass(frozen=True, slots=True)
class Plan(PlanRules):
    """A plan of the mesh. tiers: from the cheapest to the most expensive. revision: 0 if not published.

    scorer: empty for the judge's default. source: where the plan is from, note: of who published it, created_at: Unix time,
    input_digest: of its inputs. prediction: only of a computed plan.
    """

    revision: int = 0
    tiers: Annotated[tuple[TierPlan, ...], AtMost(MAX_TIERS, "tiers")] = ()
    scorer: str = ""
    judge_unavailable: JudgeUnavailable = JudgeUnavailable.ESCALATE
    source: str = ""
    note: str = ""
    created_at: float = 0.0
    input_digest: str = ""
    prediction: Prediction | None = None

    def tier(self, name: str) -> TierPlan | None:
        """The tier of a name, if there is one.

        Example:
            >>> plan = Plan(tiers=(TierPlan("small", "qwen", threshold=50.0, instances=2),))
            >>> plan.tier("small").instances, plan.tier("huge")
            (2, None)
        """
        return next((tier for tier in self.tiers if tier.name == name), None)


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
    """Stages and their total QoE (lower is better), compared with one stage.

    gap: relative distance to the least quality. plan: the published plan, if it was published.
    verdict: None where nothing was replayed. qoe: the model by which the stages were planned.
    """

    stages: tuple[Stage, ...]
    quality: float
    one_stage_quality: float
    gap: float
    elapsed_seconds: float
    plan: Plan | None = None
    verdict: StagesVerdict | None = None
    qoe: QoeModel | None = None
