"""What a plan's routing has besides thresholds. No I/O."""

from dataclasses import dataclass

from planner_service.early_checks import EarlyRule
from services.domain.long_answers import LongAnswers


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """Of the tiers but the last; each is empty where a plan has none.

    skip_below: the predicted score below which a tier is passed over. long_answers: from which length and score on an answer
    stands whatever the threshold. early: checks of unfinished answers. best_answer: a request's reply is its best answer,
    which holds for all tiers; see services.domain.best_answer.
    """

    skip_below: tuple[float | None, ...] = ()
    long_answers: tuple[LongAnswers | None, ...] = ()
    early: tuple[EarlyRule, ...] = ()
    best_answer: bool = False


NO_RULES = RoutingRules()
