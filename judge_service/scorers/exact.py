"""Compares an answer with the expected one: 100 or 0. No I/O."""

from collections.abc import Sequence as Seq

from pydantic import Field

from penstock.judge_service.scoring.comparison import EQUAL_NUMBERS, Compare, same
from penstock.judge_service.scoring.extension import ScorerExtension, ScorerSite
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.services.domain.errors import invalid
from penstock.types.judging import JudgedAnswer


class ExactScorer(Scorer):
    """Compares with the expected answer. compare: the text, the last number, or the text after the last `Answer:`."""

    def __init__(self, compare: Compare, tolerance: float = EQUAL_NUMBERS) -> None:
        """tolerance: largest relative difference of numbers."""
        self._compare, self._tolerance = compare, tolerance

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        scores = []
        for i, item in enumerate(answers):
            if item.reference is None:
                raise invalid(f"items[{i}].reference", "this scorer needs the expected answer")
            scores.append(RawScore.of_share(same(self._compare, item.answer, item.reference, self._tolerance)))
        return scores


class Exact(ScorerExtension):
    """`exact`: comparison with an expected answer."""

    compare: Compare = "final-answer"
    """How two answers are compared: the text, the last number, or the text after the last `Answer:`."""
    tolerance: float = Field(default=EQUAL_NUMBERS, ge=0, lt=1)
    """With `compare: number`: largest relative difference of numbers that count as equal."""

    def needs_reference(self) -> bool:
        return True

    def build(self, site: ScorerSite) -> ExactScorer:
        return ExactScorer(self.compare, self.tolerance)
