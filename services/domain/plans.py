"""A plan: the tiers, their instances, and the score from which each tier's answer stands. No I/O."""

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.domain.errors import FieldProblem, InvalidRequest
from services.domain.stages import QoeModel, Stage, stage_problems

CASCADE_MODEL = "cascade"
MAX_INSTANCES = 100_000
_TIER_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}\Z")


class JudgeUnavailable(enum.Enum):
    """What a router does with an answer that cannot be judged."""

    ESCALATE = "escalate"  # the largest tier answers: quality holds, cost rises
    ACCEPT = "accept"  # the answer stands: cost holds, quality falls


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier. `threshold` (0 to 100) is None on the last tier, whose answers always stand.

    stages: which of its instances serve which sequence lengths; none: every instance serves every length. qoe: by which its
    stages were laid out and refine their boundaries.
    """

    name: str
    model: str
    threshold: float | None
    instances: int
    stages: tuple[Stage, ...] = ()
    qoe: QoeModel | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan was computed for, and what it was expected to reach.

    objective: which latency was made small. workload_digest: equal digests, equal workloads. quality: from 0 to 100.
    latency_p95_s: of the slowest tier.
    """

    objective: str
    target: str
    workload_digest: str
    quality: float
    latency_p95_s: float
    end_to_end_p95_s: float


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a plan came from; `created_at` in seconds since the epoch, `input_digest` of what it was made from.

    prediction: None for a plan that nobody computed.
    """

    source: str
    note: str = ""
    created_at: float = 0.0
    input_digest: str = ""
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiers from the cheapest up. `revision` 0 is a plan that has not been published. An empty `scorer` is the judge's
    default."""

    revision: int
    tiers: tuple[TierPlan, ...]
    scorer: str = ""
    judge_unavailable: JudgeUnavailable = JudgeUnavailable.ESCALATE
    provenance: Provenance = field(default_factory=lambda: Provenance("unknown"))

    def tier(self, name: str) -> TierPlan | None:
        return next((t for t in self.tiers if t.name == name), None)

    def validate(self) -> None:
        """Raise InvalidRequest naming every unsound field."""
        problems = [*self._problems()]
        if problems:
            raise InvalidRequest(*problems)

    def _problems(self) -> Iterator[FieldProblem]:
        if not self.tiers:
            yield FieldProblem("plan.tiers", "at least one tier is needed")
        seen: set[str] = set()
        for i, tier in enumerate(self.tiers):
            path, last = f"plan.tiers[{i}]", i == len(self.tiers) - 1
            if not _TIER_NAME.match(tier.name):
                yield FieldProblem(f"{path}.name", "must be 1 to 63 of a-z, 0-9, -, _ and ., not starting with a sign")
            elif tier.name == CASCADE_MODEL:
                yield FieldProblem(f"{path}.name", f"'{CASCADE_MODEL}' means all tiers together")
            elif tier.name in seen:
                yield FieldProblem(f"{path}.name", f"'{tier.name}' stands twice")
            seen.add(tier.name)
            if last and tier.threshold is not None:
                yield FieldProblem(f"{path}.threshold", "the last tier's answers always stand: it has no threshold")
            elif not last and tier.threshold is None:
                yield FieldProblem(f"{path}.threshold", "missing: every tier but the last needs one")
            elif tier.threshold is not None and not 0 <= tier.threshold <= 100:
                yield FieldProblem(f"{path}.threshold", f"must be from 0 to 100, not {tier.threshold}")
            if not 0 <= tier.instances <= MAX_INSTANCES:
                yield FieldProblem(f"{path}.instance_count", f"must be from 0 to {MAX_INSTANCES}, not {tier.instances}")
            yield from stage_problems(tier.stages, f"{path}.stages")
            if tier.stages and (held := sum(stage.instances for stage in tier.stages)) != tier.instances:
                yield FieldProblem(f"{path}.stages", f"hold {held} instances, the tier {tier.instances}")
            if tier.stages and tier.qoe is None:
                yield FieldProblem(f"{path}.qoe", "missing: stages need the model that they refine by")
