"""A scorer that likes brief answers."""

from collections.abc import Sequence

from pydantic import Field

from penstock.judge_service.scoring.extension import ScorerExtension, ScorerSite
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.types.judging import JudgedAnswer


class BriefScorer(Scorer):
    """raw: the number of words, negated. Score: 100 up to `words`, else 0."""

    def __init__(self, words: int) -> None:
        self._words = words

    async def score(self, answers: Sequence[JudgedAnswer]) -> list[RawScore]:
        counts = [len(item.answer.split()) for item in answers]
        return [RawScore(-float(count), 100.0 * (count <= self._words)) for count in counts]


class Brief(ScorerExtension):
    """`brief`: whether an answer is brief."""

    words: int = Field(default=5, ge=1)
    """The most words of a brief answer."""

    def build(self, site: ScorerSite) -> BriefScorer:
        return BriefScorer(self.words)
