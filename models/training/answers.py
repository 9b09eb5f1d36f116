"""Replies of trained tiers to problems, computed by the torch engine, and the judge's scores of them."""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from models.training.data import turn_ids
from models.training.problems import Problem, is_correct
from models.training.rows import BOS, END, PAD, text_ids
from penstock.judge_service.scorers.judge_model.scorer import JudgeModelScorer
from penstock.services.clock import SystemClock
from penstock.types.judging import JudgedAnswer
from penstock.types.prompts import ChatMessage, ChatPrompt, TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core

TOGETHER = 96
KV_TOKENS = TOGETHER * 640
MAX_TOKENS = 512  # replies are truncated here; the longest correct one is shorter
STEPS = 150  # timed steps of one round, after WARM_STEPS
WARM_STEPS = 20
COST_BATCH = 8
SCORED_TOGETHER = 32


@dataclass(frozen=True, slots=True)
class Answered:
    """A problem, a tier's reply to it, and its length."""

    problem: Problem
    tier: str
    reply: str
    tokens: int

    @property
    def correct(self) -> bool:
        return is_correct(self.problem.answer, self.reply)


def answer_all(folder: Path, tier: str, problems: Iterable[Problem], *, threads: int = 2) -> list[Answered]:
    """The most likely replies to all problems, in order.

    threads: as many processes of one thread each share the problems; one: this process.
    """
    if threads == 1:
        return _answer(folder, tier, problems)
    every = list(problems)
    size = max(1, -(-len(every) // threads))
    starts = range(0, len(every), size)
    with ProcessPoolExecutor(threads, multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(_answer, folder, tier, every[at : at + size]) for at in starts]
        return [answered for part in parts for answered in part.result()]


def _answer(folder: Path, tier: str, problems: Iterable[Problem]) -> list[Answered]:
    options = TorchEngineOptions(folder, tier, max_running=TOGETHER, max_queued=TOGETHER, kv_tokens=KV_TOKENS)
    core, _ = torch_core(options, SystemClock())
    source = iter(enumerate(problems))
    batch_problems: list[Problem] = []
    pieces: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    under_way, exhausted = 0, False
    while under_way or not exhausted:
        while not exhausted and under_way < TOGETHER:
            item = next(source, None)
            if item is None:
                exhausted = True
                break
            i, problem = item
            prompt = [BOS, *turn_ids(problem)[0]]
            sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
            core.add(GenerationRequest(str(i), TokenPrompt(tuple(prompt)), sampling), prompt)
            batch_problems.append(problem)
            pieces[str(i)], counts[str(i)] = [], 0
            under_way += 1
        for name, event in core.step():
            if isinstance(event, TokenFrame):
                pieces[name].append(event.text)
                counts[name] += len(event.token_ids)
            else:
                under_way -= 1
    return [
        Answered(problem, tier, "".join(pieces[str(i)]), counts[str(i)]) for i, problem in enumerate(batch_problems)
    ]


def chat_of(problem: Problem) -> ChatPrompt:
    """The problem as a request's prompt."""
    return ChatPrompt(tuple(ChatMessage(m.role, m.content) for m in problem.messages))


def accuracy(answered: Seq[Answered]) -> float:
    return sum(a.correct for a in answered) / len(answered)


def score_all(folder: Path, answered: Seq[Answered], *, threads: int = 2) -> list[float]:
    """The judge's raw scores, computed by the production code."""

    async def run() -> list[float]:
        scorer = JudgeModelScorer(folder, max_batch=64, max_tokens=16_384, threads=threads, device="cpu")
        await scorer.start()
        items = [JudgedAnswer(chat_of(a.problem), a.reply, a.tier) for a in answered]
        scores = [raw.raw for raw in await scorer.score(items)]
        await scorer.close()
        return scores

    return asyncio.run(run())


@torch.inference_mode()
def logprobs_all(folder: Path, answered: Seq[Answered], *, threads: int = 2) -> list[list[float]]:
    """The judge's log-probability of each token of each reply, including the end token."""
    torch.set_num_threads(threads)
    model = LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    rows = []
    for a in answered:
        prompt = [BOS, *turn_ids(a.problem)[0]]
        rows.append((prompt, [*prompt, *text_ids(a.reply), END]))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][1]))
    result: list[list[float]] = [[] for _ in rows]
    for at in range(0, len(order), SCORED_TOGETHER):
        chosen = order[at : at + SCORED_TOGETHER]
        width = max(len(rows[i][1]) for i in chosen)
        ids = torch.tensor([rows[i][1] + [PAD] * (width - len(rows[i][1])) for i in chosen])
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1], dim=-1)
        chosen_logprobs = logprobs.gather(2, ids[:, 1:, None])[:, :, 0].tolist()  # (B, T - 1)
        for b, i in enumerate(chosen):
            prompt, token_ids = rows[i]
            result[i] = chosen_logprobs[b][len(prompt) - 1 : len(token_ids) - 1]
    return result


def step_cost_s(folder: Path, *, threads: int = 1) -> float:
    """Median CPU seconds of a decode step of COST_BATCH replies; independent of other processes."""
    options = TorchEngineOptions(
        folder, "cost", max_running=COST_BATCH, max_queued=COST_BATCH, kv_tokens=COST_BATCH * 640, threads=threads
    )
    core, _ = torch_core(options, SystemClock())
    prompt = [BOS] + [65] * 100
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=WARM_STEPS + STEPS + 50, ignore_eos=True)
    for i in range(COST_BATCH):
        core.add(GenerationRequest(str(i), TokenPrompt(tuple(prompt)), sampling), prompt)
    for _ in range(WARM_STEPS):
        core.step()
    times = []
    for _ in range(STEPS):
        began = time.thread_time()
        core.step()
        times.append(time.thread_time() - began)
    return statistics.median(times)
