"""Answers to score, and their scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from penstock.types.limits import MAX_TIERS, AtMost
from penstock.types.problems import FieldProblem, length_problems
from penstock.types.prompts import Prompt, prompt_problems
from penstock.types.replies import FinishReason
from penstock.types.structured import StructuredOutput

MAX_ITEMS = 256
MAX_ANSWER_CHARS = 1_000_000


@dataclass(frozen=True, slots=True)
class LogprobSummary:
    """Statistics of the logprobs of an answer's tokens (natural logarithms)."""

    tokens: int
    mean: float
    least: float

    @classmethod
    def of(cls, logprobs: Sequence[float]) -> "LogprobSummary":
        """logprobs: of the answer's tokens, at least one."""
        return cls(len(logprobs), sum(logprobs) / len(logprobs), min(logprobs))


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """An answer to score.

    reference: the expected answer, if known.
    tool_format: how the answering model writes tool calls; empty if unknown.
    structured_output: the form that was requested.
    """

    prompt: Prompt
    answer: str
    tier: str = ""
    finish_reason: FinishReason = FinishReason.STOP
    logprobs: LogprobSummary | None = None
    reference: str | None = None
    tool_format: str = ""
    structured_output: StructuredOutput | None = None

    def problems(self, path: str) -> Iterator[FieldProblem]:
        yield from prompt_problems(self.prompt, f"{path}.prompt")
        if self.structured_output is not None:
            yield from self.structured_output.problems(f"{path}.structured_output")
        yield from length_problems(self.answer, MAX_ANSWER_CHARS, f"{path}.answer")


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """scorer: empty for the judge's default."""

    items: Annotated[tuple[JudgedAnswer, ...], AtMost(MAX_ITEMS, "items")]
    scorer: str = ""

    def problems(self) -> Iterator[FieldProblem]:
        if not self.items:
            yield FieldProblem("items", f"1 to {MAX_ITEMS} items, not 0")
        for i, item in enumerate(self.items):
            yield from item.problems(f"items[{i}]")


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """score: from 0 to 100, calibrated if the scorer has a calibration. raw: the scorer's raw score.

    reason: why the answer was not passed to the scorer (score and raw are 0); empty otherwise.
    """

    score: float
    raw: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """A scorer of a judge. kind: the entry point's name. needs_logprobs, needs_reference: fields of an answer to score that
    must be set. tiers: whose models read prompt and answer for a score."""

    name: str
    kind: str = ""
    calibrated: bool = False
    needs_logprobs: bool = False
    needs_reference: bool = False
    tiers: Annotated[tuple[str, ...], AtMost(MAX_TIERS, "tiers")] = ()

    @property
    def warning(self) -> str:
        """What an operator should know of it; empty if it is calibrated."""
        if self.calibrated:
            return ""
        return (
            f"the scorer '{self.name}' is not calibrated: a score of 70 need not mean that 70 in 100 such answers are right; "
            "`penstock measure PROMPTS --labelled samples.jsonl` says what it is worth, `python -m penstock.judge_service."
            f"calibrate --scorer {self.name} --samples samples.jsonl --out calibration.json` calibrates it"
        )
