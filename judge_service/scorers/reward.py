"""Scores with a reward model that SGLang serves (`--is-embedding`), through its `/classify` endpoint.

Conversations are rendered and tokenized here, by the chat template of the model, and sent as token ids: the endpoint would
not apply the template.
"""

import asyncio
import math
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from judge_service.scorers.openai_chat import retry_after_s
from services.domain.errors import DeadlineExceeded, Overloaded, PromptTooLong, RequestFailed, Unavailable, invalid
from services.domain.requests import ChatPrompt, TextPrompt, TokenPrompt
from services.text_threads import TextThread
from services.tool_calls import plain_chat


class RewardScorer:
    """raw: the reward, an unbounded number. Score without calibration: its logistic function in percent.

    Reward models are trained on comparisons (Bradley and Terry), so only differences of rewards have a meaning: calibrate.
    """

    kind = ScorerKind.REWARD
    needs_logprobs = False
    needs_reference = False
    scores_unfinished = False

    def __init__(self, endpoint: str, folder: Path, *, api_key: str | None, timeout_s: float, concurrency: int) -> None:
        """endpoint: base URL of the server, without `/v1`. folder: the model's tokenizer and configuration."""
        self._url, self._folder, self._api_key = f"{endpoint.rstrip('/')}/classify", folder, api_key
        self._timeout, self._slots = aiohttp.ClientTimeout(total=timeout_s), asyncio.Semaphore(concurrency)
        self._thread = TextThread("tokenize")

    async def start(self) -> None:
        """Load the tokenizer.

        Raises:
            OSError: There is none in the folder.
            ValueError: It has no chat template.
        """
        await asyncio.to_thread(self._load)
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._session = aiohttp.ClientSession(timeout=self._timeout, headers=headers)

    def _load(self) -> None:
        from transformers import AutoConfig, AutoTokenizer  # seconds of imports

        self._tokenizer = AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True)
        if not self._tokenizer.chat_template:
            raise ValueError(f"{self._folder}: a reward model needs a chat template")
        config = AutoConfig.from_pretrained(str(self._folder), local_files_only=True)
        self._context: int = config.max_position_embeddings

    async def close(self) -> None:
        self._thread.close()
        await self._session.close()

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        conversations = []
        for i, item in enumerate(answers):
            chat = _chat(item, i)
            characters = sum(len(message["content"]) for message in chat)
            ids = await self._thread.submit(characters, partial(self._tokens, chat))
            if len(ids) > self._context:
                raise PromptTooLong.by(f"items[{i}].prompt", len(ids), self._context)
            conversations.append(ids)
        async with self._slots:
            rewards = await self._rewards(conversations)
        return [RawScore(reward, 100.0 * _logistic(reward)) for reward in rewards]

    def _tokens(self, chat: list[dict[str, str]]) -> list[int]:
        rendered: str = self._tokenizer.apply_chat_template(chat, tokenize=False)
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    async def _rewards(self, conversations: list[list[int]]) -> list[float]:
        """The rewards of conversations given as token ids."""
        try:
            async with self._session.post(self._url, json={"input_ids": conversations}) as response:
                if response.status in (429, 503):
                    raise Overloaded(f"{self._url} is full", retry_after_s(response.headers.get("Retry-After")))
                if response.status == 400:
                    raise RequestFailed(f"{self._url} refused the conversation")  # its text may quote the prompt
                if response.status != 200:
                    raise Unavailable(f"{self._url} answered {response.status}")
                results: Any = await response.json()
                rewards = [_reward(result) for result in results]
        except TimeoutError:
            raise DeadlineExceeded(f"{self._url} gave no reward within {self._timeout.total:g} s") from None
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self._url}: {error!r}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Unavailable(f"{self._url}: unexpected response: {error!r}") from error
        if len(rewards) != len(conversations):
            raise Unavailable(f"{self._url}: {len(rewards)} rewards for {len(conversations)} conversations")
        return rewards


def _chat(item: JudgedAnswer, index: int) -> list[dict[str, str]]:
    match item.prompt:
        case ChatPrompt(messages):
            chat = [*plain_chat(messages)]
        case TextPrompt(text):
            chat = [{"role": "user", "content": text}]
        case TokenPrompt():
            raise invalid(f"items[{index}].prompt.token_ids", "a reward model reads text: send chat or text")
    return [*chat, {"role": "assistant", "content": item.answer}]


def _reward(result: dict[str, Any]) -> float:
    """The one number of a result.

    Raises:
        ValueError: It is not one finite number, as of a model with several labels.
    """
    values = result["embedding"]
    if len(values) != 1 or not math.isfinite(values[0]):
        raise ValueError(f"a reward is one number, not {len(values)}: is it a reward model?")
    return float(values[0])


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(min(-x, 80.0)))
