"""All scorers of one judge, each with its calibration."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from judge_service.calibration import Calibration
from judge_service.scorers import JudgedAnswer, Scorer
from services.domain.errors import NotFound


@dataclass(frozen=True, slots=True)
class Verdict:
    """score: 0 to 100, calibrated where the scorer is. raw: what the scorer said."""

    score: float
    raw: float


@dataclass(frozen=True, slots=True)
class Seat:
    name: str
    scorer: Scorer
    calibration: Calibration | None


class Panel:
    """Scorers by name."""

    def __init__(self, seats: Seq[Seat], default: str) -> None:
        self._seats = {seat.name: seat for seat in seats}
        self.default = default

    @property
    def seats(self) -> list[Seat]:
        return list(self._seats.values())

    async def judge(self, name: str, answers: Seq[JudgedAnswer]) -> tuple[str, list[Verdict]]:
        """(scorer used, one verdict per answer). NotFound for an unknown scorer, and what the scorer raises."""
        seat = self._seats.get(name or self.default)
        if seat is None:
            raise NotFound("scorer", name)
        raws = await seat.scorer.score(answers)
        calibrate = seat.calibration.apply if seat.calibration is not None else None
        return seat.name, [Verdict(calibrate(r.raw) if calibrate is not None else r.score, r.raw) for r in raws]
