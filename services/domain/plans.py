"""Plans: the tiers, their instances and their thresholds. No I/O."""

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.domain.bursts import BurstLadder, ladder_problems
from services.domain.early_checks import EarlyCheck, early_check_problems
from services.domain.errors import FieldProblem, InvalidRequest
from services.domain.long_answers import LongAnswers, long_answers_problems
from services.domain.stages import QoeModel, Stage, stage_problems

CASCADE_MODEL = "cascade"
MAX_INSTANCES = 100_000
_TIER_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}\Z")


class JudgeUnavailable(enum.Enum):
    """What a router does with an answer that cannot be scored."""

    ESCALATE = "escalate"  # to the last tier: keeps quality, raises cost
    ACCEPT = "accept"  # accept the answer: keeps cost, lowers quality


def same_model(served: str, planned: str) -> bool:
    """Whether a model of the mesh is the planned one: `Qwen/Qwen2.5-7B-Instruct` is a `qwen2.5-7b`.

    Ignores the organisation and case. A plan names the shape of a model, so the served name may have a suffix.
    """
    served_name, planned_name = (name.rpartition("/")[2].lower() for name in (served, planned))
    return served_name == planned_name or (bool(planned_name) and served_name.startswith(f"{planned_name}-"))


def same_models(served: Sequence[str], planned: Sequence[str]) -> bool:
    """Whether the models of the mesh are the planned ones, in any order."""
    every = all(any(same_model(name, other) for other in planned) for name in served)
    return every and len(served) == len(planned)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier. threshold: from 0 to 100; None for the last tier, whose answers are always accepted.

    stages: the length stages; without any, every instance serves all lengths. qoe: the QoE model by which stages are planned
    and refined. skip_below: the tier is passed over for prompts whose predicted score is lower; None: never. early_checks:
    when answers that are not finished are scored, and which of them are rejected. drafters: the models that draft in its
    workers. long_answers: from which length and score on answers are accepted, whatever the threshold; None: length does not
    matter.
    """

    name: str
    model: str
    threshold: float | None
    instances: int
    stages: tuple[Stage, ...] = ()
    qoe: QoeModel | None = None
    skip_below: float | None = None
    early_checks: tuple[EarlyCheck, ...] = ()
    drafters: tuple[str, ...] = ()
    long_answers: LongAnswers | None = None


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
class Provenance:
    """The origin of a plan. created_at: Unix time. input_digest: of the inputs. prediction: only for computed plans."""

    source: str
    note: str = ""
    created_at: float = 0.0
    input_digest: str = ""
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan. tiers: from the cheapest to the most expensive. revision: 0 if not published. scorer: empty for the judge's
    default. burst: how thresholds give way under a burst; None: they do not. best_answer: whether the best answer of a
    request is delivered instead of always the last one; see `best_of`."""

    revision: int
    tiers: tuple[TierPlan, ...]
    scorer: str = ""
    judge_unavailable: JudgeUnavailable = JudgeUnavailable.ESCALATE
    provenance: Provenance = field(default_factory=lambda: Provenance("unknown"))
    burst: BurstLadder | None = None
    best_answer: bool = False

    def tier(self, name: str) -> TierPlan | None:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        return None

    def validate(self) -> None:
        """Check all fields.

        Raises:
            InvalidRequest: A field is invalid; the error names every one.
        """
        problems = [*self._problems()]
        if problems:
            raise InvalidRequest(*problems)

    def _problems(self) -> Iterator[FieldProblem]:
        if not self.tiers:
            yield FieldProblem("plan.tiers", "at least one tier is needed")
        names: set[str] = set()
        for i, tier in enumerate(self.tiers):
            path, last = f"plan.tiers[{i}]", i == len(self.tiers) - 1
            if not _TIER_NAME.match(tier.name):
                yield FieldProblem(
                    f"{path}.name",
                    "must be 1 to 63 characters of a-z, 0-9, -, _ and ., starting with a letter or digit",
                )
            elif tier.name == CASCADE_MODEL:
                yield FieldProblem(f"{path}.name", f"'{CASCADE_MODEL}' is reserved for all tiers together")
            elif tier.name in names:
                yield FieldProblem(f"{path}.name", f"duplicate name '{tier.name}'")
            names.add(tier.name)
            if last and tier.threshold is not None:
                yield FieldProblem(f"{path}.threshold", "must not be set: answers of the last tier are always accepted")
            elif not last and tier.threshold is None:
                yield FieldProblem(f"{path}.threshold", "missing: required for every tier but the last")
            elif tier.threshold is not None and not 0 <= tier.threshold <= 100:
                yield FieldProblem(f"{path}.threshold", f"must be from 0 to 100, not {tier.threshold}")
            if last and tier.skip_below is not None:
                yield FieldProblem(f"{path}.skip_below", "must not be set: the last tier is never passed over")
            elif tier.skip_below is not None and not 0 <= tier.skip_below <= 100:
                yield FieldProblem(f"{path}.skip_below", f"must be from 0 to 100, not {tier.skip_below}")
            if last and tier.early_checks:
                yield FieldProblem(
                    f"{path}.early_checks", "must be empty: answers of the last tier are always accepted"
                )
            else:
                yield from early_check_problems(tier.early_checks, f"{path}.early_checks")
            if last and tier.long_answers is not None:
                yield FieldProblem(
                    f"{path}.long_answers", "must not be set: answers of the last tier are always accepted"
                )
            elif tier.long_answers is not None:
                yield from long_answers_problems(tier.long_answers, f"{path}.long_answers")
            if not 0 <= tier.instances <= MAX_INSTANCES:
                yield FieldProblem(f"{path}.instance_count", f"must be from 0 to {MAX_INSTANCES}, not {tier.instances}")
            yield from stage_problems(tier.stages, f"{path}.stages")
            if tier.stages and (stage_instances := sum(stage.instances for stage in tier.stages)) != tier.instances:
                yield FieldProblem(f"{path}.stages", f"have {stage_instances} instances, the tier {tier.instances}")
            if tier.stages and tier.qoe is None:
                yield FieldProblem(f"{path}.qoe", "missing: stages need it")
        if self.burst is not None:
            thresholds = [tier.threshold for tier in self.tiers]
            yield from ladder_problems(self.burst, [tier.name for tier in self.tiers], thresholds, "plan.burst")
