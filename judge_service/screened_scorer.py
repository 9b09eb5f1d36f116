"""Asks a costly scorer only where a cheap one is not sure. No I/O of its own."""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from judge_service.scorer_registry import NamedScorer, ScoreResult, at_positions
from judge_service.scorers import JudgedAnswer, ScorerKind


@dataclass(frozen=True, slots=True)
class ScreenedScorer:
    """The first scorer's score where it is at most `margin` or at least 100 - margin; otherwise the second one's.

    Both scores are as their own calibrations say. raw: the score. Only answers that the second scorer is asked for take a
    place in its queue.
    """

    name: str
    screen: NamedScorer
    scorer: NamedScorer
    margin: float

    @property
    def kind(self) -> ScorerKind:
        return ScorerKind.SCREENED

    @property
    def calibrated(self) -> bool:
        return self.scorer.calibrated

    @property
    def needs_logprobs(self) -> bool:
        return self.screen.needs_logprobs or self.scorer.needs_logprobs

    @property
    def needs_reference(self) -> bool:
        return self.screen.needs_reference or self.scorer.needs_reference

    @property
    def scores_unfinished(self) -> bool:
        return self.screen.scores_unfinished and self.scorer.scores_unfinished

    async def results(self, answers: Seq[JudgedAnswer], left_s: float | None) -> list[ScoreResult]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        results = await self.screen.results(answers, left_s)
        unsure = [i for i, result in enumerate(results) if self.margin < result.score < 100 - self.margin]
        if unsure:
            left_s = None if left_s is None else max(0.0, left_s - (loop.time() - began_s))
            with at_positions(unsure):
                second = await self.scorer.results([answers[i] for i in unsure], left_s)
            for i, result in zip(unsure, second, strict=True):
                results[i] = result
        return [replace(result, raw=result.score) for result in results]
