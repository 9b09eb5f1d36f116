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

from penstock.judge_service.clients.endpoint import Endpoint
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.judge_service.scoring.questions import plain_prompt
from penstock.services.domain.errors import PromptTooLong
from penstock.services.text_threads import TextThread
from penstock.types.judging import JudgedAnswer


class RewardScorer(Scorer):
    """raw: the reward, an unbounded number. Score without calibration: its logistic function in percent.

    Reward models are trained on comparisons (Bradley and Terry), so only differences of rewards have a meaning: calibrate.
    """

    def __init__(self, endpoint: str, folder: Path, *, api_key: str | None, timeout_s: float, concurrency: int) -> None:
        """endpoint: base URL of the server, without `/v1`. folder: the model's tokenizer and configuration."""
        self._endpoint = Endpoint(f"{endpoint.rstrip('/')}/classify", api_key=api_key, timeout_s=timeout_s)
        self._folder, self._slots = folder, asyncio.Semaphore(concurrency)
        self._thread = TextThread("tokenize")

    async def start(self) -> None:
        await asyncio.to_thread(self._load)
        await self._endpoint.start()

    def _load(self) -> None:
        from transformers import AutoConfig, AutoTokenizer  # seconds of imports

        self._tokenizer = AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True)
        if not self._tokenizer.chat_template:
            raise ValueError(f"{self._folder}: a reward model needs a chat template")
        config = AutoConfig.from_pretrained(str(self._folder), local_files_only=True)
        self._context: int = config.max_position_embeddings

    async def close(self) -> None:
        self._thread.close()
        await self._endpoint.close()

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        conversations = []
        for i, item in enumerate(answers):
            chat = [*plain_prompt(item.prompt, i), {"role": "assistant", "content": item.answer}]
            characters = sum(len(message["content"]) for message in chat)
            ids = await self._thread.run(characters, partial(self._tokens, chat))
            if len(ids) > self._context:
                raise PromptTooLong.by(f"items[{i}].prompt", len(ids), self._context)
            conversations.append(ids)
        async with self._slots:
            rewards = await self._endpoint.post(
                {"input_ids": conversations}, lambda results: _rewards(results, len(conversations))
            )
        return [RawScore.of_logit(reward) for reward in rewards]

    def _tokens(self, chat: list[dict[str, str]]) -> list[int]:
        rendered: str = self._tokenizer.apply_chat_template(chat, tokenize=False)
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _rewards(results: Any, count: int) -> list[float]:
    """The one number of each result.

    Raises:
        ValueError: There are not as many, or one is not one finite number, as of a model with several labels.
    """
    embeddings = [result["embedding"] for result in results]
    if len(embeddings) != count:
        raise ValueError(f"{len(embeddings)} rewards for {count} conversations")
    for values in embeddings:
        if len(values) != 1 or not math.isfinite(values[0]):
            raise ValueError(f"a reward is one number, not {len(values)}: is it a reward model?")
    return [float(values[0]) for values in embeddings]
