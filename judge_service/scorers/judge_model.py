"""A model that judges (prompt, answer) in one forward pass; in Hugging Face format, of either kind.

A causal language model judges by how likely it finds the answer: raw is the log-probability of its least likely token, the
end included. One wrong step makes an answer wrong, and a model that knows better is surprised just there; a classifier has
to learn to compare every token with what it would have said (docs/adr/0012).
A sequence-classification model with one label judges by its logit.
"""

import asyncio
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from services.background import end, supervise
from services.domain.errors import Overloaded, PromptTooLong, Unavailable, invalid
from services.domain.requests import ChatPrompt, TextPrompt, TokenPrompt


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """max_batch: answers in a forward pass. max_tokens: tokens in it, padding counted. max_queued: answers waiting."""

    max_batch: int
    max_tokens: int
    max_queued: int


@dataclass(slots=True)
class _Waiting:
    ids: list[int]
    start: int  # of the answer
    answer: "asyncio.Future[float]"


class JudgeModelScorer:
    """Requests that come together share forward passes. Uncalibrated, the score is the probability that raw stands for."""

    kind = ScorerKind.JUDGE_MODEL
    needs_logprobs = False
    needs_reference = False

    def __init__(self, folder: Path, options: BatchOptions, *, threads: int, device: str) -> None:
        self._folder, self._options, self._threads, self._device = folder, options, threads, device
        self._queue: list[_Waiting] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await asyncio.to_thread(self._load)
        self._task = supervise("judge-model", self._serve)

    async def close(self) -> None:
        if self._task is not None:
            await end(self._task)
        for waiting in self._queue:
            if not waiting.answer.done():
                waiting.answer.set_exception(Unavailable("the judge is stopping"))

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        if len(self._queue) + len(answers) > self._options.max_queued:
            raise Overloaded(f"{len(self._queue)} answers are waiting for the judge model", 0.5)
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(*self._encode(item, i), loop.create_future()) for i, item in enumerate(answers)]
        self._queue += waiting
        self._news.set()
        try:
            raws = [await entry.answer for entry in waiting]
        finally:
            for entry in waiting:
                entry.answer.cancel()
        return [RawScore(raw, 100.0 * (_exp(raw) if self._likelihood else 1.0 / (1.0 + _exp(-raw)))) for raw in raws]

    def _load(self) -> None:
        torch.set_num_threads(self._threads)
        folder = str(self._folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        architectures = AutoConfig.from_pretrained(folder, local_files_only=True).architectures or ()
        self._likelihood = any(name.endswith("ForCausalLM") for name in architectures)
        kind = AutoModelForCausalLM if self._likelihood else AutoModelForSequenceClassification
        model = kind.from_pretrained(folder, dtype="auto", local_files_only=True)
        if not self._likelihood and model.config.num_labels != 1:
            raise ValueError(f"{folder}: a judge model has one label, not {model.config.num_labels}")
        self._model = model.eval().to(self._device)
        self._context: int = model.config.max_position_embeddings
        self._pad: int = model.config.pad_token_id
        self._forward([([self._pad] * 8, 4)])

    def _encode(self, item: JudgedAnswer, index: int) -> tuple[list[int], int]:
        """(the chat as it stands after the answer, where the answer begins)."""
        match item.prompt:
            case ChatPrompt(messages):
                chat = [{"role": m.role, "content": m.content} for m in messages]
            case TextPrompt(text):
                chat = [{"role": "user", "content": text}]
            case TokenPrompt():
                raise invalid(f"items[{index}].prompt.token_ids", "the judge model reads text: send chat or text")
        asked: str = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        chat.append({"role": "assistant", "content": item.answer})
        rendered: str = self._tokenizer.apply_chat_template(chat, tokenize=False)
        ids: list[int] = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        start = len(self._tokenizer(asked, add_special_tokens=False)["input_ids"])
        if start >= self._context:
            raise PromptTooLong.by(f"items[{index}].prompt", start, self._context - 1)
        ids = ids[: self._context]  # an answer that runs on is judged by what of it can be read
        return ids, min(start, len(ids) - 1)

    async def _serve(self) -> None:
        """Take what waits, shortest with shortest, score, answer; forever."""
        while True:
            self._queue = [entry for entry in self._queue if not entry.answer.done()]
            if not self._queue:
                self._news.clear()
                await self._news.wait()
                continue
            batch = self._next_batch()
            try:
                raws = await asyncio.to_thread(self._forward, [(entry.ids, entry.start) for entry in batch])
            except Exception as error:
                for entry in batch:
                    if not entry.answer.done():
                        entry.answer.set_exception(Unavailable(f"the judge model failed: {error}"))
                continue
            for entry, raw in zip(batch, raws, strict=True):
                if not entry.answer.done():
                    entry.answer.set_result(raw)

    def _next_batch(self) -> list[_Waiting]:
        """The one that waits longest, and those whose length is nearest to its own, within the limits."""
        first = self._queue[0]
        rest = sorted(self._queue[1:], key=lambda entry: abs(len(entry.ids) - len(first.ids)))
        batch, longest = [first], len(first.ids)
        for entry in rest:
            longest = max(longest, len(entry.ids))
            if len(batch) >= self._options.max_batch or longest * (len(batch) + 1) > self._options.max_tokens:
                break
            batch.append(entry)
        chosen = {id(entry) for entry in batch}
        self._queue = [entry for entry in self._queue if id(entry) not in chosen]
        return batch

    @torch.inference_mode()
    def _forward(self, batch: list[tuple[list[int], int]]) -> list[float]:
        """The raw score of each (token ids, where the answer begins); padded to (B, T)."""
        rows = [row for row, _ in batch]
        width = max(map(len, rows))
        ids = torch.tensor([row + [self._pad] * (width - len(row)) for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._device)
        if not self._likelihood:
            logits: list[float] = self._model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
            return logits
        hidden = self._model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, T, H)
        head = self._model.get_output_embeddings()
        found = []
        for b, (row, start) in enumerate(batch):  # logits of answers only: (answer, V)
            logprobs = torch.log_softmax(head(hidden[b, start - 1 : len(row) - 1]).float(), dim=-1)
            found.append(float(logprobs.gather(1, ids[b, start : len(row), None]).min()))
        return found


def _exp(x: float) -> float:
    return math.exp(min(x, 80.0))
