"""Scores (prompt, answer) in one forward pass of a model in Hugging Face format, of one of two kinds.

With a causal language model, raw is the log-probability of the answer's least likely token, the end token included: one wrong
step makes an answer wrong, and a better model assigns that step a low probability. A classifier would have to learn to
compare every token with the one it expects (docs/adr/history.md#75).
With a sequence-classification model with one label, raw is its logit.
"""

import asyncio
import json
import logging
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from penstock.judge_service.scorers.judge_model.tiled_linear import use_tiles
from penstock.judge_service.scoring.interface import RawScore, Scorer
from penstock.judge_service.scoring.questions import plain_prompt
from penstock.services.background import end, supervise
from penstock.services.domain.errors import PenstockError, PromptTooLong, RequestFailed, Unavailable, invalid
from penstock.services.heap import HeapRelease, use_one_arena
from penstock.services.prompt_bounds import characters_per_token
from penstock.services.text_threads import TextThread, prompt_characters
from penstock.services.tool_calls.rendering import encodable, template_chat
from penstock.types.judging import JudgedAnswer
from penstock.types.problems import FieldProblem
from penstock.types.prompts import ChatPrompt

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    ids: list[int]
    start: int  # of the answer
    answer: "asyncio.Future[float]"


class JudgeModelScorer(Scorer):
    """Scores concurrent requests in shared forward passes. Without calibration, the score is the probability given by raw."""

    def __init__(self, folder: Path, *, max_batch: int, max_tokens: int, threads: int, device: str) -> None:
        """max_batch: answers in one forward pass. max_tokens: tokens in it, padding included."""
        self._folder, self._max_batch, self._max_tokens = folder, max_batch, max_tokens
        self._threads, self._device = threads, device
        self._queue: list[_Waiting] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread = TextThread("tokenize")
        self._heap = HeapRelease()
        self._likelihood = False

    async def start(self) -> None:
        await asyncio.to_thread(self._load)
        self._task = supervise("judge-model", self._serve)

    async def close(self) -> None:
        if self._task is not None:
            await end(self._task)
        self._thread.close()
        for waiting in self._queue:
            if not waiting.answer.done():
                waiting.answer.set_exception(Unavailable("the judge is stopping"))

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(*await self._encoded(item, i), loop.create_future()) for i, item in enumerate(answers)]
        self._queue += waiting
        self._news.set()
        try:
            raws = [await entry.answer for entry in waiting]
        finally:
            for entry in waiting:
                entry.answer.cancel()
        return [RawScore(raw, 100.0 * math.exp(raw)) if self._likelihood else RawScore.of_logit(raw) for raw in raws]

    def _load(self) -> None:
        use_one_arena()
        torch.set_num_threads(self._threads)
        folder = str(self._folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        architectures = AutoConfig.from_pretrained(folder, local_files_only=True).architectures or ()
        self._likelihood = any(name.endswith("ForCausalLM") for name in architectures)
        kind = AutoModelForCausalLM if self._likelihood else AutoModelForSequenceClassification
        model = kind.from_pretrained(folder, dtype="auto", local_files_only=True)
        if not self._likelihood and model.config.num_labels != 1:
            raise ValueError(f"{folder}: a judge model must have one label, not {model.config.num_labels}")
        self._model = model.eval().to(self._device)
        use_tiles(self._model.base_model)
        self._context: int = model.config.max_position_embeddings
        pad = model.config.pad_token_id
        self._has_pad = pad is not None
        self._pad: int = pad or 0  # masked, so any token will do
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        per_token = characters_per_token(json.loads(backend.to_str()))
        self._max_characters = None if per_token is None else self._context * per_token
        self._forward(self._trial)

    @property
    def _trial(self) -> list[tuple[list[int], int]]:
        """A batch that every judge model can score."""
        return [([self._pad] * 8, 4)]

    async def _encoded(self, item: JudgedAnswer, index: int) -> tuple[list[int], int]:
        """Like `_encode`, but on the text thread if the texts are long."""
        characters = prompt_characters(item.prompt) + len(item.answer)
        return await self._thread.run(characters, lambda: self._encode(item, index))

    def _encode(self, item: JudgedAnswer, index: int) -> tuple[list[int], int]:
        """(token ids of the chat with the answer, index of the answer's first token). Text beyond the context is not
        tokenized.

        Raises:
            PromptTooLong: The prompt alone fills the context.
            InvalidRequest: The prompt has a form that the model cannot read.
        """
        chat: list[dict[str, Any]]
        tools: list[dict[str, Any]] | None = None
        if isinstance(item.prompt, ChatPrompt) and "tools" in str(self._tokenizer.chat_template):
            chat, tools = template_chat(item.prompt)
        else:
            chat = [*plain_prompt(item.prompt, index)]
        max_characters = self._max_characters
        answer = item.answer if max_characters is None else item.answer[:max_characters]
        try:
            render = self._tokenizer.apply_chat_template
            question: str = render(chat, tools=tools, tokenize=False, add_generation_prompt=True)
            chat.append({"role": "assistant", "content": answer})
            rendered: str = render(chat, tools=tools, tokenize=False)
        except Exception as error:  # templates are code: any error is caused by these messages
            problem = f"the judge model's chat template refuses them ({type(error).__name__})"
            raise invalid(f"items[{index}].prompt.chat.messages", problem) from None
        if max_characters is not None and len(question) > max_characters:
            problem = f"{len(question)} characters are more than a context of {self._context} tokens can hold"
            raise PromptTooLong(FieldProblem(f"items[{index}].prompt", problem))
        start = self._tokens(question)
        if len(start) >= self._context:
            raise PromptTooLong.by(f"items[{index}].prompt", len(start), self._context - 1)
        ids = self._tokens(rendered)[: self._context]  # an answer beyond the context is scored by the part that fits
        return ids, min(len(start), len(ids) - 1)

    def _tokens(self, text: str) -> list[int]:
        """Tokenize with the batch call, which releases the GIL; `encode` holds it."""
        (encoded,) = self._tokenizer.backend_tokenizer.encode_batch_fast([encodable(text)], add_special_tokens=False)
        return list(encoded.ids)

    async def _serve(self) -> None:
        """Score the waiting answers in batches of similar length, forever."""
        while True:
            self._queue = [entry for entry in self._queue if not entry.answer.done()]
            if not self._queue:
                self._news.clear()
                await self._news.wait()
                continue
            batch = self._next_batch()
            raws = await asyncio.to_thread(self._scored, [(entry.ids, entry.start) for entry in batch])
            for entry, raw in zip(batch, raws, strict=True):
                if entry.answer.done():
                    continue
                if isinstance(raw, PenstockError):
                    entry.answer.set_exception(raw)
                else:
                    entry.answer.set_result(raw)

    def _scored(self, batch: list[tuple[list[int], int]]) -> list[float | PenstockError]:
        """The raw scores of a batch. A batch that fails is split, down to single answers, which get errors."""
        self._heap.release_if_due()
        try:
            return [*self._forward(batch)]
        except Exception as error:
            if len(batch) > 1:
                half = len(batch) // 2
                return [*self._scored(batch[:half]), *self._scored(batch[half:])]
            _log.exception("an answer cannot be scored")
            kind = type(error).__name__
        try:
            self._forward(self._trial)
        except Exception:
            return [Unavailable(f"the judge model fails ({kind})")]
        return [RequestFailed(f"the judge model cannot score this answer ({kind})")]

    def _next_batch(self) -> list[_Waiting]:
        """The answer that has waited longest, and those of the most similar length, within the limits."""
        first = self._queue[0]
        rest = sorted(self._queue[1:], key=lambda entry: abs(len(entry.ids) - len(first.ids)))
        batch, longest = [first], len(first.ids)
        for entry in rest:
            longest = max(longest, len(entry.ids))
            if len(batch) >= self._max_batch or longest * (len(batch) + 1) > self._max_tokens:
                break
            batch.append(entry)
        chosen = {id(entry) for entry in batch}
        self._queue = [entry for entry in self._queue if id(entry) not in chosen]
        return batch

    @torch.inference_mode()
    def _forward(self, batch: list[tuple[list[int], int]]) -> list[float]:
        """The raw scores of rows (token ids, index of the answer's first token), padded to (B, T)."""
        # The classifier finds the end of a row by its padding.
        if not self._likelihood and not self._has_pad and len(batch) > 1:
            return [score for row in batch for score in self._forward([row])]
        rows = [row for row, _ in batch]
        width = max(map(len, rows))
        ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._device)
        if not self._likelihood:
            logits: list[float] = self._model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
            return logits
        hidden = self._model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, T, H)
        head = self._model.get_output_embeddings()
        scores = []
        for b, (row, start) in enumerate(batch):  # logits of answers and their end tokens only: (answer, V)
            logprobs = torch.log_softmax(head(hidden[b, start - 1 : len(row) - 1]).float(), dim=-1)
            scores.append(float(logprobs.gather(1, ids[b, start : len(row), None]).min()))
        return scores
