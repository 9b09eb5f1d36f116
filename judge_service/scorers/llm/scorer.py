"""Has a language model grade answers: a tier of the mesh, or any OpenAI-compatible endpoint.

The model gives one digit, 0 to 9. If logprobs are available, the score is the expected digit, which is finer than the digit
itself. Or it says whether the answer is correct, and the score is the probability of that.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from penstock.judge_service.scorers.llm.grading import (
    BEST_GRADE,
    Asked,
    NoGrade,
    correctness,
    expected_grade,
    grade_question,
)
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.judge_service.scoring.questions import Messages
from penstock.services.background import gathered
from penstock.services.domain.errors import RequestFailed, Unavailable
from penstock.types.judging import JudgedAnswer


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
