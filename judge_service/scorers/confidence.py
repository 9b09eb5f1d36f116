"""Scores an answer by the mean logprob of its tokens. No I/O."""

import math
from collections.abc import Sequence as Seq

from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from services.domain.errors import invalid


class ConfidenceScorer:
    """raw: mean logprob per token. Uncalibrated score: the tokens' geometric mean probability, in percent."""

    kind = ScorerKind.CONFIDENCE
    needs_logprobs = True
    needs_reference = False

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        scores = []
        for i, item in enumerate(answers):
            if item.logprobs is None:
                raise invalid(f"items[{i}].logprobs", "this scorer needs the logprobs of the answer's tokens")
            if not item.logprobs.mean <= 0:
                raise invalid(f"items[{i}].logprobs.mean_logprob", "a logprob is at most 0")
            scores.append(RawScore(item.logprobs.mean, 100.0 * math.exp(item.logprobs.mean)))
        return scores
