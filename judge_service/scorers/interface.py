"""The interface of scorers."""

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from services.domain.requests import FinishReason, Prompt
from services.domain.structured import StructuredOutput


class ScorerKind(enum.Enum):
    JUDGE_MODEL = "judge-model"
    LLM = "llm"
    CONFIDENCE = "confidence"
    EXACT = "exact"
    REWARD = "reward"
    JSON_SCHEMA = "json-schema"
    CODE = "code"
    CONSISTENCY = "consistency"
    COMBINED = "combined"
    SCREENED = "screened"


@dataclass(frozen=True, slots=True)
class LogprobSummary:
    """Statistics of the logprobs of an answer's tokens (natural logarithms)."""

    tokens: int
    mean: float
    least: float


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """An answer to score.

    reference: the expected answer, if known.
    tool_format: how the answering model writes tool calls; empty if unknown.
    structured_output: the form that was requested. unfinished: the answer is the beginning of one that is being generated.
    """

    prompt: Prompt
    answer: str
    tier: str = ""
    finish_reason: FinishReason = FinishReason.STOP
    logprobs: LogprobSummary | None = None
    reference: str | None = None
    tool_format: str = ""
    structured_output: StructuredOutput | None = None
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class RawScore:
    """raw: on the scorer's own scale, the input of calibration. score: from 0 to 100, without calibration."""

    raw: float
    score: float


class Scorer(Protocol):
    """Scores answers. A higher raw score means a better answer."""

    @property
    def kind(self) -> ScorerKind: ...

    @property
    def needs_logprobs(self) -> bool: ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def scores_unfinished(self) -> bool: ...

    async def start(self) -> None:
        """Load the model or connect to it."""
        ...

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        """The scores of the answers.

        Raises:
            PromptTooLong: A prompt exceeds the context of the model.
            Overloaded: The backend is full.
            Unavailable: The backend cannot be reached.
        """
        ...

    async def close(self) -> None: ...
