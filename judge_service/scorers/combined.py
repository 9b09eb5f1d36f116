"""Combines the raw scores of other scorers by a fitted logistic model."""

import asyncio
from collections.abc import Sequence as Seq

from judge_service.combination import Combination, probability
from judge_service.scorers.interface import JudgedAnswer, RawScore, Scorer, ScorerKind
from services.background import end


class CombinedScorer:
    """raw: the logit of the model for the answer's tier. Score: its probability in percent, which needs no calibration."""

    kind = ScorerKind.COMBINED
    scores_unfinished = False

    def __init__(self, parts: Seq[Scorer], combination: Combination) -> None:
        """parts: the scorers of the combination, in its order. They are started and closed by others."""
        self._parts, self._combination = parts, combination

    @property
    def needs_logprobs(self) -> bool:
        return any(part.needs_logprobs for part in self._parts)

    @property
    def needs_reference(self) -> bool:
        return any(part.needs_reference for part in self._parts)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        by_part = await raw_scores(self._parts, answers)
        scores = []
        for item, raws in zip(answers, by_part, strict=True):
            logit = self._combination.logit(item.tier, raws)
            scores.append(RawScore(logit, 100.0 * probability(logit)))
        return scores


async def raw_scores(parts: Seq[Scorer], answers: Seq[JudgedAnswer]) -> list[list[float]]:
    """The raw scores of each answer, one per part."""
    tasks = [asyncio.ensure_future(part.score(answers)) for part in parts]
    try:
        by_part = await asyncio.gather(*tasks)
    finally:  # after a failure or a cancellation, end the other parts
        await end(*tasks)
    return [[scores[i].raw for scores in by_part] for i in range(len(answers))]
