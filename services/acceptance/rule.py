"""What every rule gives: its names, what it does to judged prompts, what planning tries of it, and the words for it. No I/O.

The decision where requests are served is a function next to the rule's class: it is called for each request.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.services.domain.errors import invalid
from penstock.types.planning import PlanOptions
from penstock.types.problems import FieldProblem
from penstock.types.rules import AcceptanceRules, PlanRules, RuleOptions, TierRules

if TYPE_CHECKING:
    from penstock.services.acceptance.arrays import Floats
    from penstock.services.acceptance.judged import JudgedSample


class AcceptanceRule:
    """One rule. field: of TierRules or PlanRules, and of AcceptanceRules.

    option: of RuleOptions, asks for it; empty for one that no question asks for. question: what `penstock plan new`
    writes. predicts: whether it decides by predicted scores.
    """

    field: ClassVar[str]
    option: ClassVar[str] = ""
    question: ClassVar[str] = ""
    predicts: ClassVar[bool] = False

    @property
    def of_tiers(self) -> bool:
        """Whether each tier but the last has a rule of its own."""
        return self.field in {field.name for field in fields(TierRules)}

    def asked(self, options: RuleOptions) -> bool:
        """Whether a question asks for it."""
        return bool(self.option) and getattr(options, self.option)

    def value(self, rules: AcceptanceRules | PlanRules | TierRules) -> Any:
        return getattr(rules, self.field)

    def unfit(self, judged: "JudgedSample", drawn: PlanOptions) -> FieldProblem | None:
        """Why a deployment in which a tier has the rule cannot be simulated; None if it can."""
        if not self.predicts or judged.predicted is not None:
            return None
        return FieldProblem("quality.prompts", f"have no predicted_scores, which {self.field} needs")

    def refused(self, value: Any, later: Sequence[str]) -> FieldProblem | None:
        """What is wrong with a tier's value, but for its range. later: the tiers after it. The field is the value's."""
        return None

    def under(self, answers: "JudgedSample", value: Any) -> "JudgedSample":
        """The same prompts where the rule decides as in routers.

        Raises:
            InvalidRequest: They do not have what the rule is about, or it has not one value for each tier but the last.
        """
        raise NotImplementedError

    def choices(self, judged: "JudgedSample", tier: int) -> Sequence[Any]:
        """What planning tries for a tier; of a rule for all tiers, its value where it is used."""
        return ()

    def in_mesh_file(self, value: Any) -> Any:
        """What manifests say of it; None for nothing."""
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    def lines(self, plan: Any, question: RuleOptions | None) -> list[str]:
        """What is said of it in a plan. question: its rules; None of a plan that is served."""
        return []

    def predicted(self, answers: "JudgedSample") -> "Floats":
        """(N, C) the predicted scores; InvalidRequest if there are none."""
        if answers.predicted is None:
            raise invalid(self.field, "needs predicted scores, which the judged prompts do not have")
        return answers.predicted

    def check_count(self, answers: "JudgedSample", values: Sequence[Any]) -> None:
        """InvalidRequest if there is not one value for each tier but the last."""
        if len(values) != (tiers := len(answers.tiers)) - 1:
            raise invalid(self.field, f"{tiers} tiers have {tiers - 1} rules, not {len(values)}")
