"""Asks a language model for a grade: a tier of the mesh, or any OpenAI-compatible endpoint.

The grade is one digit, 0 to 9. If the logprobs of its first token are available, the score is the expected grade under the
probabilities of the digits (Liu et al. 2023, G-Eval), which is finer than the grade itself, and deterministic.
"""

import asyncio
import math
import re
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import aiohttp

from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from services.background import end
from services.domain.errors import DeadlineExceeded, Overloaded, Unavailable, invalid
from services.domain.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from services.tool_calls import calls_text

BEST_GRADE = 9
MAX_TOKENS = 4
TOP_LOGPROBS = 10  # enough for the digits
INSTRUCTION = (
    "You grade answers. Read the question and the answer, then give one digit from 0 (useless or wrong) to 9 (correct and "
    "complete). Reply with the digit only."
)
_DIGIT = re.compile(r"(?<!\d)([0-9])(?!\d)")


def grade_question(prompt: Prompt, answer: str, index: int = 0) -> list[dict[str, str]]:
    """The messages of a grading request."""
    match prompt:
        case ChatPrompt(messages):
            question = "\n".join(f"{m.role}: {m.content}{calls_text(m.tool_calls)}" for m in messages)
        case TextPrompt(text):
            question = text
        case TokenPrompt():
            raise invalid(f"items[{index}].prompt.token_ids", "a language model reads text: send chat or text")
    task = f"[Question]\n{question}\n\n[Answer]\n{answer}\n\n[Grade 0 to {BEST_GRADE}]"
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": task}]


def expected_grade(choice: dict[str, Any]) -> float:
    """The grade in a choice of a chat completion: the expected value under the first token's logprobs, or else the digit.

    Raises:
        ValueError: There is neither.
    """
    positions = ((choice.get("logprobs") or {}).get("content")) or []
    for position in positions[:1]:
        mass: dict[int, float] = {}
        for entry in position.get("top_logprobs") or [position]:
            token = entry["token"].strip()
            if len(token) == 1 and token.isdigit():
                mass[int(token)] = mass.get(int(token), 0.0) + math.exp(entry["logprob"])
        if mass:
            return sum(grade * share for grade, share in mass.items()) / sum(mass.values())
    text = (choice.get("message") or {}).get("content") or ""
    match = _DIGIT.search(text)
    if match is None:
        raise ValueError(f"no grade in a reply of {len(text)} characters")  # which may quote the prompt
    return float(match[1])


Messages = list[dict[str, str]]


class Chat(Protocol):
    """A language model that grades."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def ask(self, messages: Messages) -> dict[str, Any]:
        """The choice of a chat completion with at most MAX_TOKENS tokens and TOP_LOGPROBS logprobs each.

        Raises:
            Overloaded: The model has no capacity.
            DeadlineExceeded: It did not answer in time.
            Unavailable: It cannot be reached.
        """
        ...


class LlmScorer:
    """Scores by grade. raw: the expected grade, 0 to 9. Score without calibration: the grade as a percentage of 9."""

    kind = ScorerKind.LLM
    needs_logprobs = False
    needs_reference = False

    def __init__(self, chat: Chat, *, concurrency: int) -> None:
        self._chat, self._slots = chat, asyncio.Semaphore(concurrency)

    async def start(self) -> None:
        await self._chat.start()

    async def close(self) -> None:
        await self._chat.close()

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        questions = [grade_question(item.prompt, item.answer, i) for i, item in enumerate(answers)]
        tasks = [asyncio.create_task(self._grade(question)) for question in questions]
        try:
            grades = await asyncio.gather(*tasks)
        finally:  # after a failure or a cancellation, end the other requests
            await end(*tasks)
        return [RawScore(grade, 100.0 * grade / BEST_GRADE) for grade in grades]

    async def _grade(self, question: Messages) -> float:
        async with self._slots:
            choice = await self._chat.ask(question)
        try:
            return expected_grade(choice)
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"the judge gave no grade: {error}") from error


class OpenAiChat:
    """Any OpenAI-compatible endpoint."""

    def __init__(self, endpoint: str, model: str, *, api_key: str | None, timeout_s: float) -> None:
        self._url, self._model, self._api_key = f"{endpoint.rstrip('/')}/chat/completions", model, api_key
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def start(self) -> None:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._session = aiohttp.ClientSession(timeout=self._timeout, headers=headers)

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, messages: Messages) -> dict[str, Any]:
        body = {
            "model": self._model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
        }
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status == 429:
                    raise Overloaded(f"{self._url} is full", _retry_after_s(response.headers.get("Retry-After")))
                if response.status != 200:
                    raise Unavailable(f"{self._url} answered {response.status}")  # its text may quote the prompt
                choice: dict[str, Any] = (await response.json())["choices"][0]
                return choice
        except TimeoutError:
            raise DeadlineExceeded(f"{self._url} gave no grade within {self._timeout.total:g} s") from None
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self._url}: {error!r}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Unavailable(f"{self._url}: unexpected response: {error!r}") from error


def _retry_after_s(header: str | None) -> float:
    """The delay in a Retry-After header; 1 s if it is missing or invalid."""
    try:
        return min(60.0, max(0.1, float(header or 1.0)))
    except ValueError:
        return 1.0
