"""Scores an answer by the logprobs of its tokens. No I/O."""

import math
from collections.abc import Sequence as Seq
from typing import Literal

from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from services.domain.errors import invalid

Statistic = Literal["mean", "min"]


class ConfidenceScorer:
    """raw: the mean or least logprob of the answer's tokens. Uncalibrated score: its probability in percent.

    The mean gives the tokens' geometric mean probability. The minimum is the better judge where one wrong step makes an
    answer wrong; without calibration its scores are low for long answers.
    """

    kind = ScorerKind.CONFIDENCE
    needs_logprobs = True
    needs_reference = False
    scores_unfinished = True

    def __init__(self, statistic: Statistic = "mean") -> None:
        self._statistic = statistic

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

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
