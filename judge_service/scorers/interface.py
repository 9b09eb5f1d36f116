"""What the judge expects of a scorer."""

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


@dataclass(frozen=True, slots=True)
class LogprobSummary:
    """Of an answer's tokens; natural logarithms."""

    tokens: int
    mean: float
    least: float


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """An answer to be judged.

    reference: the expected answer, where it is known.
    tool_format: how the answering model writes tool calls; empty where it is not known.
    structured_output: the form that was asked for.
    """

    prompt: Prompt
    answer: str
    tier: str = ""
    finish_reason: FinishReason = FinishReason.STOP
    logprobs: LogprobSummary | None = None
    reference: str | None = None
    tool_format: str = ""
    structured_output: StructuredOutput | None = None


@dataclass(frozen=True, slots=True)
class RawScore:
    """raw: on the scorer's own scale, what calibration is fitted on. score: 0 to 100 without calibration."""

    raw: float
    score: float


class Scorer(Protocol):
    """One way of judging. Greater raw scores mean better answers."""

    @property
    def kind(self) -> ScorerKind: ...

    @property
    def needs_logprobs(self) -> bool: ...

    @property
    def needs_reference(self) -> bool: ...

    async def start(self) -> None:
        """Load what is needed."""
        ...

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        """One score per answer. PromptTooLong; Overloaded; Unavailable (a backend is away)."""
        ...

    async def close(self) -> None: ...
