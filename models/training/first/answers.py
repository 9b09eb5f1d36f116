"""Replies of a trained tier to problems, computed by the torch engine, for judging and measuring."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from models.training.first import tasks
from services.clock import SystemClock
from services.domain.requests import ChatMessage, ChatPrompt, GenerationRequest, SamplingParams, TokenFrame
from worker_service.engine.torch import TorchEngineOptions
from worker_service.engine.torch.engine import torch_core

TOGETHER = 128
MAX_TOKENS = 512  # replies are truncated here; the longest correct one has about 360


@dataclass(frozen=True, slots=True)
class Answered:
    """A problem, a tier's reply, and its number of tokens."""

    problem: tasks.Problem
    tier: str
    reply: str
    tokens: int

    @property
    def correct(self) -> bool:
        return tasks.is_correct(self.problem.answer, self.reply)


def answer_all(
    folder: Path, tier: str, problems: Iterable[tasks.Problem], *, temperature: float = 0.0, threads: int = 2
) -> Iterator[Answered]:
    """Yield the reply to every problem, in the order in which they finish. Problem i is sampled with seed i."""
    options = TorchEngineOptions(
        folder, tier, max_running=TOGETHER, max_queued=TOGETHER, kv_tokens=TOGETHER * 768, threads=threads
    )
    core, _ = torch_core(options, SystemClock())
    source = enumerate(problems)
    under_way: dict[str, tuple[tasks.Problem, list[str], int]] = {}
    exhausted = False
    while not exhausted or not core.idle:
        while not exhausted and len(under_way) < TOGETHER:
            item = next(source, None)
            if item is None:
                exhausted = True
                break
            i, problem = item
            sampling = SamplingParams(temperature=temperature, seed=i, max_output_tokens=MAX_TOKENS)
            request = GenerationRequest(str(i), ChatPrompt((ChatMessage("user", problem.prompt),)), sampling)
            core.add(request, core.tokenizer.encode(request.prompt))
            under_way[str(i)] = (problem, [], 0)
        for name, event in core.step():
            problem, pieces, tokens = under_way[name]
            if isinstance(event, TokenFrame):
                pieces.append(event.text)
                under_way[name] = (problem, pieces, tokens + len(event.token_ids))
            else:
                del under_way[name]
                yield Answered(problem, tier, "".join(pieces), tokens)


def accuracy(answers: Iterable[Answered]) -> float:
    correct = [answer.correct for answer in answers]
    return sum(correct) / len(correct)


def write(path: Path, answers: Iterable[Answered]) -> int:
    """Write one JSON object per line; return their number."""
    count = 0
    with path.open("w") as out:
        for a in answers:
            p = a.problem
            row = {
                "task": p.task,
                "level": p.level,
                "prompt": p.prompt,
                "expected": p.reply,
                "answer": p.answer,
                "key": p.key,
                "tier": a.tier,
                "reply": a.reply,
                "tokens": a.tokens,
            }
            out.write(json.dumps(row) + "\n")
            count += 1
    return count


def read(path: Path) -> Iterator[Answered]:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        problem = tasks.Problem(row["task"], row["level"], row["prompt"], row["expected"], row["answer"], row["key"])
        yield Answered(problem, row["tier"], row["reply"], row["tokens"])


def timed(folder: Path, tier: str, problems: list[tasks.Problem], threads: int) -> tuple[list[Answered], float]:
    """(greedy answers, output tokens per second)."""
    began = time.monotonic()
    answered = list(answer_all(folder, tier, problems, threads=threads))
    return answered, sum(a.tokens for a in answered) / (time.monotonic() - began)
