"""Asks a costly scorer only where a cheap one is not sure. No I/O of its own."""

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from pydantic import Field

from penstock.judge_service.scoring.extension import ScorerExtension, ScorerSite
from penstock.judge_service.scoring.interface import Scorer
from penstock.judge_service.scoring.registry import NamedScorer, at_positions
from penstock.services.mesh_schema.judge import MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.types.judging import JudgedAnswer, ScoreResult, ScorerInfo
from penstock.types.problems import FieldProblem


def is_sure(score: float, margin: float) -> bool:
    """Whether a cheap scorer's calibrated score counts without a second one."""
    return not margin < score < 100 - margin


@dataclass(frozen=True, slots=True)
class ScreenedScorer:
    """The first scorer's score where it is at most `margin` or at least 100 - margin; otherwise the second one's.

    Both scores are as their own calibrations say. raw: the score. Only answers that the second scorer is asked for take a
    place in its queue. An answer without the logprobs that the first one needs is for the second.
    """

    info: ScorerInfo
    screen: NamedScorer
    scorer: NamedScorer
    margin: float

    async def results(self, answers: Seq[JudgedAnswer], left_s: float | None) -> list[ScoreResult]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        needed = self.screen.info.needs_logprobs
        able = [i for i, answer in enumerate(answers) if answer.logprobs is not None or not needed]
        results: dict[int, ScoreResult] = {}
        if able:
            with at_positions(able):
                first = await self.screen.results([answers[i] for i in able], left_s)
            results = {i: result for i, result in zip(able, first, strict=True) if is_sure(result.score, self.margin)}
        unsure = [i for i in range(len(answers)) if i not in results]
        if unsure:
            left_s = None if left_s is None else max(0.0, left_s - (loop.time() - began_s))
            with at_positions(unsure):
                second = await self.scorer.results([answers[i] for i in unsure], left_s)
            results |= zip(unsure, second, strict=True)
        return [replace(results[i], raw=results[i].score) for i in range(len(answers))]


class Screened(ScorerExtension):
    """`screened`: one scorer where it is sure, another one elsewhere."""

    has_raw_scores = False

    scorers: tuple[str, ...] = ()
    """The cheap scorer, and the one that is asked where it is not sure."""
    margin: float = Field(default=2.0, gt=0, le=50)
    """The first scorer is sure of scores up to this and from 100 less this. 50: of all, so that the second scores
    only answers without the logprobs that the first needs."""

    def parts(self) -> tuple[str, ...]:
        return self.scorers

    def problems(self, scorer: MeshScorer, mesh: MeshFile) -> Iterator[FieldProblem]:
        if len(self.scorers) != 2:
            yield FieldProblem("scorers", "a screened scorer needs two: the cheap one and the other")

    def build(self, site: ScorerSite) -> Scorer:
        raise site.error("a screened scorer has no scores of its own")

    async def registered(self, site: ScorerSite, stack: AsyncExitStack) -> NamedScorer:
        screen, costly = (site.others[name] for name in self.scorers)
        return ScreenedScorer(self.info(site), screen, costly, self.margin)

    def fitted_to(self, site: ScorerSite) -> tuple[str, ...]:
        raise site.error(f"a screened scorer has nothing to fit; calibrate its parts: {', '.join(self.scorers)}")
