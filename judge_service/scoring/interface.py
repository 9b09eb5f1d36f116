"""The interface of scorers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from penstock.types.judging import JudgedAnswer


@dataclass(frozen=True, slots=True)
class RawScore:
    """raw: on the scorer's own scale, the input of calibration. score: from 0 to 100, without calibration."""

    raw: float
    score: float

    @classmethod
    def of_share(cls, share: float) -> "RawScore":
        """Of a scorer whose scale is from 0 to 1."""
        return cls(float(share), 100.0 * share)


class Scorer(ABC):
    """Scores answers. A higher raw score means a better answer."""

    @property
    def needs_logprobs(self) -> bool:
        """Whether answers need the logprobs of their tokens."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether answers need an expected answer."""
        return False

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
