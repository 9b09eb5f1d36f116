"""The scorers of a judge with their calibrations."""

import asyncio
import re
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass

from judge_service.backlog import Backlog
from judge_service.calibration import Calibration
from judge_service.guards import ALL_GUARDS, Guard, objection
from judge_service.scorers import JudgedAnswer, Scorer
from services.domain.errors import DeadlineExceeded, FieldProblem, InvalidRequest, NotFound, invalid


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """score: from 0 to 100, calibrated if the scorer has a calibration. raw: the scorer's raw score.

    reason: why the answer was not passed to the scorer (score and raw are 0); empty otherwise.
    """

    score: float
    raw: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RegisteredScorer:
    """A scorer with its calibration. backlog: None for a scorer that answers at once."""

    name: str
    scorer: Scorer
    calibration: Calibration | None
    backlog: Backlog | None = None


class ScorerRegistry:
    """Scorers by name."""

    def __init__(self, scorers: Seq[RegisteredScorer], default: str, guards: frozenset[Guard] = ALL_GUARDS) -> None:
        self._scorers = {registered.name: registered for registered in scorers}
        self.default, self._guards = default, guards

    @property
    def scorers(self) -> list[RegisteredScorer]:
        return list(self._scorers.values())

    async def judge(
        self, name: str, answers: Seq[JudgedAnswer], left_s: float | None = None
    ) -> tuple[str, list[ScoreResult]]:
        """Score answers; return (name of the scorer, one result per answer). Only answers that pass the guards are scored.

        left_s: time to the caller's deadline; None: no deadline.

        Raises:
            NotFound: There is no such scorer.
            InvalidRequest: An answer is unfinished, and the scorer does not score such answers.
            Overloaded: The scorer's queue is full, or too long for the deadline.
            DeadlineExceeded: The deadline has passed; answers that were not started are dropped.
            PenstockError: The scorer failed.
        """
        registered = self._scorers.get(name or self.default)
        if registered is None:
            raise NotFound("scorer", name)
        for i, item in enumerate(answers):
            if item.unfinished and not registered.scorer.scores_unfinished:
                raise invalid(f"items[{i}].unfinished", f"scorer {registered.name} does not score unfinished answers")
        objections = [objection(item, self._guards) for item in answers]
        scored = [i for i, reason in enumerate(objections) if reason is None]
        results = [ScoreResult(0.0, 0.0, reason or "") for reason in objections]
        if not scored:
            return registered.name, results
        place = registered.backlog.place(len(scored), left_s) if registered.backlog is not None else nullcontext()
        with place:
            try:
                async with asyncio.timeout(left_s):
                    raws = await registered.scorer.score([answers[i] for i in scored])
            except TimeoutError:
                raise DeadlineExceeded(f"no score within {left_s or 0:.1f} s, the deadline of the request") from None
            except InvalidRequest as error:
                raise type(error)(*(_at_request_index(problem, scored) for problem in error.problems)) from error
        calibrate = registered.calibration.apply if registered.calibration is not None else None
        for i, r in zip(scored, raws, strict=True):
            results[i] = ScoreResult(calibrate(r.raw) if calibrate is not None else r.score, r.raw)
        return registered.name, results


def _at_request_index(problem: FieldProblem, scored: Seq[int]) -> FieldProblem:
    """The problem with the index in `items[...]` changed from that of the scored answers to that of the request."""
    field = re.sub(r"^items\[(\d+)\]", lambda match: f"items[{scored[int(match[1])]}]", problem.field)
    return FieldProblem(field, problem.problem)
