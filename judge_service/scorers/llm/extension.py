"""Has a language model grade answers: a tier of the mesh, or any OpenAI-compatible endpoint. The entry point `llm`.

The model gives one digit, 0 to 9. If logprobs are available, the score is the expected digit, which is finer than the digit
itself. Or it says whether the answer is correct, and the score is the probability of that.
"""

import asyncio
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from pydantic import Field

from penstock.judge_service.clients.tier_scorer import TierScorer
from penstock.judge_service.scorers.llm.grading import (
    BEST_GRADE,
    Asked,
    NoGrade,
    correctness,
    expected_grade,
    grade_question,
)
from penstock.judge_service.scoring.extension import ScorerSite
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.judge_service.scoring.questions import REPLY_TOKENS, Messages
from penstock.services.background import gathered
from penstock.services.domain.errors import RequestFailed, Unavailable
from penstock.services.mesh_schema.judge import MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.types.judging import JudgedAnswer
from penstock.types.problems import FieldProblem

FIXED_BODY = ("model", "messages", "stream", "n", "logprobs", "top_logprobs", "max_tokens", "temperature")
OF_ENDPOINTS = frozenset({"api_key_env", "endpoint", "extra_body", "model"})


class Chat(Protocol):
    """A language model that grades."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def ask(self, messages: Messages) -> dict[str, Any]:
        """The choice of a chat completion, greedy, with logprobs.

        Raises:
            Overloaded: The model has no capacity.
            DeadlineExceeded: It did not answer in time.
            Unavailable: It cannot be reached.
        """
        ...


class LlmScorer(Scorer):
    """Grades answers.

    raw: the expected grade, 0 to 9; of `correct`, the probability that the answer is, 0 to 1. Score without calibration: raw
    as a percentage of its maximum.
    """

    def __init__(self, chat: Chat, *, concurrency: int, rubric: str = "", asks: Asked = "grade") -> None:
        """rubric: what to look at; added to the task."""
        self._chat, self._slots = chat, asyncio.Semaphore(concurrency)
        self._rubric, self._asks = rubric, asks

    async def start(self) -> None:
        await self._chat.start()

    async def close(self) -> None:
        await self._chat.close()

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        questions = [
            grade_question(item.prompt, item.answer, i, reference=item.reference, rubric=self._rubric, asks=self._asks)
            for i, item in enumerate(answers)
        ]
        choices = await gathered(*map(self._ask, questions))
        if self._asks == "correct":
            return [RawScore.of_share(_read(correctness, choice)) for choice in choices]
        grades = [_read(expected_grade, choice) for choice in choices]
        return [RawScore(grade, 100.0 * grade / BEST_GRADE) for grade in grades]

    async def _ask(self, question: Messages) -> dict[str, Any]:
        async with self._slots:
            return await self._chat.ask(question)


def _read(reader: Callable[[dict[str, Any]], float], choice: dict[str, Any]) -> float:
    try:
        return reader(choice)
    except NoGrade as error:  # this answer has no grade; the model itself is well
        raise RequestFailed(f"the judge gave no grade: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unavailable(f"the judge's reply is malformed: {error!r}") from error


class Llm(TierScorer):
    """`llm`: a language model that is asked for a grade, a tier of the mesh or at an endpoint."""

    key_variable = "api_key_env"

    tier: str = ""
    """The tier of this mesh whose model grades the answers; replaces endpoint and model."""
    endpoint: str = ""
    """Base URL of an OpenAI-compatible API, including `/v1`."""
    model: str = ""
    """The model's name at the endpoint."""
    api_key_env: str = ""
    """Name of the environment variable that holds the endpoint's key. Empty: no key."""
    rubric: str = Field(default="", max_length=10_000)
    """What to look at when grading; added to the task."""
    asks: Asked = "grade"
    """What the model is asked for: a digit from 0 to 9, or whether the answer is correct, and how probable it finds that."""
    thinking_tokens: int = Field(default=0, ge=0, le=65_536)
    """Tokens that a model may use to think (until `</think>`) before its grade."""
    extra_body: dict[str, Any] = Field(default={})
    """Further fields of the requests to an endpoint, such as `chat_template_kwargs: {enable_thinking: false}`."""

    def problems(self, scorer: MeshScorer, mesh: MeshFile) -> Iterator[FieldProblem]:
        yield from super().problems(scorer, mesh)
        if bool(self.tier) == bool(self.endpoint and self.model):
            yield FieldProblem("", "an llm scorer needs either tier, or endpoint and model")
        elif self.tier:
            for name in sorted(self.model_fields_set & OF_ENDPOINTS):
                yield FieldProblem(name, "is for an endpoint, and a tier grades: leave it out")
        elif "tier_share" in self.model_fields_set:
            yield FieldProblem("tier_share", "is for a tier, and an endpoint grades: leave it out")
        for name in FIXED_BODY:
            if name in self.extra_body:
                yield FieldProblem(f"extra_body.{name}", "is set by the scorer itself")

    def reading_tiers(self, site: ScorerSite) -> tuple[str, ...]:
        return (self.tier,) if self.tier else ()

    def cost(self) -> str:
        tokens = self.thinking_tokens + REPLY_TOKENS
        return f"a call of {self.tier or self.model} that reads prompt and answer and writes at most {tokens} tokens"

    def build(self, site: ScorerSite) -> LlmScorer:
        from penstock.judge_service.scorers.llm.openai_chat import OpenAiChat

        max_tokens = self.thinking_tokens + REPLY_TOKENS
        chat: Chat
        if self.tier:
            chat = self.chat(site, [self.tier], max_tokens=max_tokens)
        else:
            chat = OpenAiChat(
                self.endpoint,
                self.model,
                api_key=site.key(self.api_key_env),
                timeout_s=self.limit_s(site),
                max_tokens=max_tokens,
                extra_body=self.extra_body,
            )
        return LlmScorer(chat, concurrency=self.concurrency, rubric=self.rubric, asks=self.asks)
