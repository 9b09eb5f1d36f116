"""Combines the raw scores of other scorers by a fitted logistic model."""

from collections.abc import Sequence as Seq

from penstock.judge_service.scorers.combined.combination import Combination, probability
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.services.background import gathered
from penstock.types.judging import JudgedAnswer


class CombinedScorer(Scorer):
    """raw: the logit of the model for the answer's tier. Score: its probability in percent, which needs no calibration."""

    def __init__(self, parts: Seq[Scorer], combination: Combination) -> None:
        """parts: the scorers of the combination, in its order. They are started and closed by others."""
        self._parts, self._combination = parts, combination

    @property
    def needs_logprobs(self) -> bool:
        return any(part.needs_logprobs for part in self._parts)

    @property
    def needs_reference(self) -> bool:
        return any(part.needs_reference for part in self._parts)

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        by_part = await raw_scores(self._parts, answers)
        scores = []
        for item, raws in zip(answers, by_part, strict=True):
            logit = self._combination.logit(item.tier, raws)
            scores.append(RawScore(logit, 100.0 * probability(logit)))
        return scores


async def raw_scores(parts: Seq[Scorer], answers: Seq[JudgedAnswer]) -> list[list[float]]:
    """The raw scores of each answer, one per part."""
    by_part = await gathered(*(part.score(answers) for part in parts))
    return [[scores[i].raw for scores in by_part] for i in range(len(answers))]
