"""The interface of scorers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from penstock.types.judging import JudgedAnswer

MAX_LOGIT = 80.0


def probability(logit: float) -> float:
    """The logistic function."""
    return 1.0 / (1.0 + math.exp(min(-logit, MAX_LOGIT)))


@dataclass(frozen=True, slots=True)
class RawScore:
    """raw: on the scorer's own scale, the input of calibration. score: from 0 to 100, without calibration."""

    raw: float
    score: float

    @classmethod
    def of_share(cls, share: float) -> "RawScore":
        """Of a scorer whose scale is from 0 to 1."""
        return cls(float(share), 100.0 * share)

    @classmethod
    def of_logit(cls, logit: float) -> "RawScore":
        return cls(logit, 100.0 * probability(logit))


class Scorer(ABC):
    """Scores answers. A higher raw score means a better answer."""

    async def start(self) -> None:  # noqa: B027 -- many have nothing to start
        """Load the model or connect to it.

        Raises:
            OSError: A file cannot be read.
            ValueError: It cannot be used.
        """

    @abstractmethod
    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        """The scores of the answers.

        Raises:
            PromptTooLong: A prompt exceeds the context of the model.
            Overloaded: The backend is full.
            Unavailable: The backend cannot be reached.
        """

    async def close(self) -> None:  # noqa: B027
        """Give up what `start` took."""
