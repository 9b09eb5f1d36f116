"""The work that contenders are given, and how it is driven."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.worker_service.text.hf import HfTokenizer

HELDOUT = Path("models/heldout.jsonl")


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompts`, each answered with exactly `output_tokens` greedy tokens, `concurrency` of them concurrently."""

    concurrency: int
    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int

    @property
    def tokens(self) -> int:
        """Output tokens in all."""
        return len(self.prompts) * self.output_tokens


def questions(count: int, seed: int) -> list[str]:
    """Held-out prompts of the shipped family that are one message, drawn with a seed."""
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    return random.Random(seed).sample([row["prompt"] for row in rows if "prompt" in row], count)


def workload(model: Path, concurrency: int, waves: int, output_tokens: int, seed: int) -> Workload:
    """`waves` prompts for each place of `concurrency`; no prompt twice, so that no prefix cache helps."""
    tokenizer = HfTokenizer(model)
    texts = questions(concurrency * waves, seed + concurrency)
    prompts = tuple(tuple(tokenizer.encode(ChatPrompt((ChatMessage("user", text),)))) for text in texts)
    return Workload(concurrency, prompts, output_tokens)


async def drive(work: Workload, generate: Callable[[Sequence[int], int], Awaitable[int]]) -> float:
    """Seconds until every prompt has its answer; RuntimeError for an answer of another length."""
    places = asyncio.Semaphore(work.concurrency)

    async def one(prompt: Sequence[int]) -> None:
        async with places:
            received = await generate(prompt, work.output_tokens)
            if received != work.output_tokens:
                raise RuntimeError(f"{received} tokens where {work.output_tokens} were asked for")

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for prompt in work.prompts:
            group.create_task(one(prompt))
    return time.perf_counter() - began
