"""Asks a costly scorer only where a cheap one is not sure. No I/O of its own."""

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from judge_service.scorer_registry import NamedScorer, ScoreResult, at_positions
from judge_service.scorers import JudgedAnswer, ScorerKind


def is_sure(score: float, margin: float) -> bool:
    """Whether a cheap scorer's calibrated score counts without a second one."""
    return not margin < score < 100 - margin


@dataclass(frozen=True, slots=True)
class ScreenedScorer:
    """The first scorer's score where it is at most `margin` or at least 100 - margin; otherwise the second one's.

    Both scores are as their own calibrations say. raw: the score. Only answers that the second scorer is asked for take a
    place in its queue. An answer without the logprobs that the first one needs is for the second. Unfinished answers are for
    the first: most of them stand, and reading every part would cost more than what is rejected by it.
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
        return self.screen.scores_unfinished

    async def results(self, answers: Seq[JudgedAnswer], left_s: float | None) -> list[ScoreResult]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        able = [i for i, answer in enumerate(answers) if self._screens(answer)]
        results: dict[int, ScoreResult] = {}
        if able:
            with at_positions(able):
                first = await self.screen.results([answers[i] for i in able], left_s)
            results = {
                i: result
                for i, result in zip(able, first, strict=True)
                if answers[i].unfinished or is_sure(result.score, self.margin)
            }
        unsure = [i for i in range(len(answers)) if i not in results]
        if unsure:
            left_s = None if left_s is None else max(0.0, left_s - (loop.time() - began_s))
            with at_positions(unsure):
                second = await self.scorer.results([answers[i] for i in unsure], left_s)
            results |= zip(unsure, second, strict=True)
        return [replace(results[i], raw=results[i].score) for i in range(len(answers))]

    def _screens(self, answer: JudgedAnswer) -> bool:
        """Whether the first scorer is asked; it refuses a part without logprobs that the second cannot score either."""
        able = answer.logprobs is not None or not self.screen.needs_logprobs
        return able or (answer.unfinished and not self.scorer.scores_unfinished)
