"""The scorers of a judge with their calibrations."""

import asyncio
import re
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.judge_service.scoring.backlog import Backlog
from penstock.judge_service.scoring.guards import ALL_GUARDS, Guard, objection
from penstock.judge_service.scoring.interface import Scorer
from penstock.services.domain.errors import DeadlineExceeded, InvalidRequest, NotFound
from penstock.types.judging import JudgedAnswer, ScoreResult, ScorerInfo
from penstock.types.problems import FieldProblem

if TYPE_CHECKING:
    from penstock.judge_service.calibration.isotonic import Calibration


class NamedScorer(Protocol):
    """What the registry holds: a scorer by name, with everything that makes raw scores comparable."""

    @property
    def info(self) -> ScorerInfo: ...

    async def results(self, answers: Seq[JudgedAnswer], left_s: float | None) -> list[ScoreResult]:
        """The scores of answers that pass the guards. left_s: time to the caller's deadline; None: no deadline.

        Raises:
            Overloaded: The scorer's queue is full, or too long for the deadline.
            DeadlineExceeded: The deadline has passed; answers that were not started are dropped.
            PenstockError: The scorer failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class RegisteredScorer:
    """A scorer with its calibration. backlog: None for a scorer that answers at once."""

    info: ScorerInfo
    scorer: Scorer
    calibration: "Calibration | None"
    backlog: Backlog | None = None

    async def results(self, answers: Seq[JudgedAnswer], left_s: float | None) -> list[ScoreResult]:
        with self.backlog.place(len(answers), left_s) if self.backlog is not None else nullcontext():
            try:
                async with asyncio.timeout(left_s):
                    scores = await self.scorer.score(answers)
            except TimeoutError:
                raise DeadlineExceeded(f"no score within {left_s or 0:.1f} s, the deadline of the request") from None
        if self.calibration is None:
            return [ScoreResult(score.score, score.raw) for score in scores]
        return [ScoreResult(self.calibration.apply(score.raw), score.raw) for score in scores]


class ScorerRegistry:
    """Scorers by name."""

    def __init__(self, scorers: Seq[NamedScorer], default: str, guards: frozenset[Guard] = ALL_GUARDS) -> None:
        self._scorers = {registered.info.name: registered for registered in scorers}
        self.default, self._guards = default, guards

    def is_calibrated(self, name: str) -> bool:
        """Whether a scorer's scores are shares of right answers."""
        return self._scorers[name].info.calibrated

    @property
    def scorers(self) -> list[NamedScorer]:
        return list(self._scorers.values())

    async def judge(
        self, name: str, answers: Seq[JudgedAnswer], left_s: float | None = None
    ) -> tuple[str, list[ScoreResult]]:
        """Score answers; return (name of the scorer, one result per answer). Only answers that pass the guards are scored.

        left_s: time to the caller's deadline; None: no deadline.

        Raises:
            NotFound: There is no such scorer.
            Overloaded: The scorer's queue is full, or too long for the deadline.
            DeadlineExceeded: The deadline has passed; answers that were not started are dropped.
            PenstockError: The scorer failed.
        """
        registered = self._scorers.get(name or self.default)
        if registered is None:
            raise NotFound("scorer", name)
        info = registered.info
        objections = [objection(item, self._guards) for item in answers]
        scored = [i for i, reason in enumerate(objections) if reason is None]
        results = [ScoreResult(0.0, 0.0, reason or "") for reason in objections]
        if not scored:
            return info.name, results
        with at_positions(scored):
            scores = await registered.results([answers[i] for i in scored], left_s)
        for i, result in zip(scored, scores, strict=True):
            results[i] = result
        return info.name, results


@contextmanager
def at_positions(positions: Seq[int]) -> Iterator[None]:
    """Errors that name `items[i]` of a selection name `items[positions[i]]` instead."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(*(_moved(problem, positions) for problem in error.problems)) from error


def _moved(problem: FieldProblem, positions: Seq[int]) -> FieldProblem:
    field = re.sub(r"^items\[(\d+)\]", lambda match: f"items[{positions[int(match[1])]}]", problem.field)
    return FieldProblem(field, problem.problem)
