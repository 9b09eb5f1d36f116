"""Has a language model grade answers: a tier of the mesh, or any OpenAI-compatible endpoint.

The model gives one digit, 0 to 9. If logprobs are available, the score is the expected digit, which is finer than the digit
itself. Or it compares the answer with a reference answer, in both orders, because language models prefer a position (Zheng
et al. 2023, section 3.4).
"""

import asyncio
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from judge_service.scorers.grading import (
    BEST_GRADE,
    Messages,
    NoGrade,
    comparison_question,
    expected_grade,
    grade_question,
    preference,
)
from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from services.background import end
from services.domain.errors import RequestFailed, Unavailable, invalid


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


class LlmScorer:
    """Grades answers, or compares them with reference answers.

    raw: the expected grade, 0 to 9; with pairwise, the probability that the answer is better than the reference, 0 to 1, as
    the mean over both orders. Score without calibration: raw as a percentage of its maximum.
    """

    kind = ScorerKind.LLM
    needs_logprobs = False
    scores_unfinished = False

    def __init__(self, chat: Chat, *, concurrency: int, rubric: str = "", pairwise: bool = False) -> None:
        """rubric: what to look at; added to the task."""
        self._chat, self._slots = chat, asyncio.Semaphore(concurrency)
        self._rubric, self._pairwise = rubric, pairwise

    @property
    def needs_reference(self) -> bool:
        return self._pairwise

    async def start(self) -> None:
        await self._chat.start()

    async def close(self) -> None:
        await self._chat.close()

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        if self._pairwise:
            return [RawScore(share, 100.0 * share) for share in await self._preferences(answers)]
        questions = [
            grade_question(item.prompt, item.answer, i, reference=item.reference, rubric=self._rubric)
            for i, item in enumerate(answers)
        ]
        grades = [_read(expected_grade, choice) for choice in await self._ask_all(questions)]
        return [RawScore(grade, 100.0 * grade / BEST_GRADE) for grade in grades]

    async def _preferences(self, answers: Seq[JudgedAnswer]) -> list[float]:
        """The probability that each answer is better than its reference."""
        questions: list[Messages] = []
        for i, item in enumerate(answers):
            if item.reference is None:
                raise invalid(f"items[{i}].reference", "this scorer compares with a reference answer")
            for first, second in ((item.answer, item.reference), (item.reference, item.answer)):
                questions.append(comparison_question(item.prompt, first, second, i, rubric=self._rubric))
        shares = [_read(preference, choice) for choice in await self._ask_all(questions)]
        return [(shares[i] + 1.0 - shares[i + 1]) / 2 for i in range(0, len(shares), 2)]

    async def _ask_all(self, questions: Seq[Messages]) -> list[dict[str, Any]]:
        tasks = [asyncio.create_task(self._ask(question)) for question in questions]
        try:
            return await asyncio.gather(*tasks)
        finally:  # after a failure or a cancellation, end the other requests
            await end(*tasks)

    async def _ask(self, question: Messages) -> dict[str, Any]:
        async with self._slots:
            return await self._chat.ask(question)


class _Reader(Protocol):
    def __call__(self, choice: dict[str, Any]) -> float: ...


def _read(reader: _Reader, choice: dict[str, Any]) -> float:
    try:
        return reader(choice)
    except NoGrade as error:  # this answer has no grade; the model itself is well
        raise RequestFailed(f"the judge gave no grade: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unavailable(f"the judge's reply is malformed: {error!r}") from error
