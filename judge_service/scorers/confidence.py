"""Scores an answer by the logprobs of its tokens. No I/O."""

import math
from collections.abc import Sequence as Seq
from typing import Literal

from penstock.judge_service.scoring.extension import ScorerExtension, ScorerSite
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.services.domain.errors import invalid
from penstock.types.judging import JudgedAnswer

Statistic = Literal["mean", "min"]


class ConfidenceScorer(Scorer):
    """raw: the mean or least logprob of the answer's tokens. Uncalibrated score: its probability in percent.

    The mean gives the tokens' geometric mean probability. The minimum is the better judge where one wrong step makes an
    answer wrong; without calibration its scores are low for long answers.
    """

    def __init__(self, statistic: Statistic = "mean") -> None:
        self._statistic = statistic

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        scores = []
        for i, item in enumerate(answers):
            if item.logprobs is None:
                raise invalid(f"items[{i}].logprobs", "this scorer needs the logprobs of the answer's tokens")
            logprob = item.logprobs.mean if self._statistic == "mean" else item.logprobs.least
            if not logprob <= 0:
                raise invalid(f"items[{i}].logprobs.{self._statistic}_logprob", "a logprob is at most 0")
            scores.append(RawScore(logprob, 100.0 * math.exp(logprob)))
        return scores


class Confidence(ScorerExtension):
    """`confidence`: the token logprobs of the answer."""

    needs_logprobs = True

    statistic: Statistic = "mean"
    """The mean or the least logprob of the answer's tokens."""

    def stated_weight(self) -> tuple[float, float] | None:
        return (8.0, 0.0) if self.statistic == "mean" else None

    def build(self, site: ScorerSite) -> ConfidenceScorer:
        return ConfidenceScorer(self.statistic)
