"""Combines the raw scores of other scorers by a fitted logistic model."""

from collections.abc import Sequence as Seq

from penstock.judge_service.scorers.combined.combination import Combination
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.services.background import gathered
from penstock.types.judging import JudgedAnswer


class CombinedScorer(Scorer):
    """raw: the logit of the model for the answer's tier. Score: its probability in percent, which needs no calibration."""

    def __init__(self, parts: Seq[Scorer], combination: Combination) -> None:
        """parts: the scorers of the combination, in its order. They are started and closed by others."""
        self._parts, self._combination = parts, combination

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        by_part = await gathered(*(part.score(answers) for part in self._parts))
        by_answer = zip(*by_part, strict=True)
        return [
            RawScore.of_logit(self._combination.logit(item.tier, [score.raw for score in scores]))
            for item, scores in zip(answers, by_answer, strict=True)
        ]
