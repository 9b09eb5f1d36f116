"""Train the judge: a language model over (prompt, answer) that gives wrong answers a low probability, without the solution.

It starts with the weights of the large tier and is trained on the tiers' replies to training problems, on correct replies,
and on correct replies with an error inserted. While a reply agrees with the correct one, the probability of its tokens is
increased; that of the first wrong token is decreased (unlikelihood training, Welleck et al., 2020); later tokens are
ignored. The score of an answer is the probability of its least likely token.
"""

import itertools
import json
import random
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from models.training.first import answers, tasks
from models.training.first.answers import Answered
from models.training.first.data import turn_ids
from models.training.first.tokenizer import save as save_tokenizer
from models.training.judge import Lesson, batches, broken, lesson_of_ids, loss_of
from models.training.learning import CONTEXT_TOKENS, learn, optimisers, save
from models.training.rows import ASSISTANT, BOS, END, USER, text_ids
from models.training.smalltalk import SMALLTALK

SEED = 21
BASE = "large"  # the tier whose weights it starts with: the best solver recognises errors best
PER_TIER = {"small": 16_000, "medium": 34_000, "large": 6_000}
SAMPLED_SHARE = 0.3  # of a tier's replies are sampled at temperature 0.7; the others are greedy
RIGHT, BROKEN = 8_000, 14_000  # replies that are not from a tier
MISPLACED = 3_000  # replies to another problem or to smalltalk, and empty replies
BATCHES = 300
MUON_LR, ADAM_LR = 0.003, 3e-4
WARMUP_STEPS = 40


def lesson(problem: tasks.Problem, reply: str) -> Lesson:
    prompt, right = turn_ids(problem)
    return lesson_of_ids([BOS, *prompt], right, [*text_ids(reply), END], good=tasks.is_correct(problem.answer, reply))


def misplaced(problem: tasks.Problem, other: tasks.Problem, rng: random.Random) -> Lesson:
    """A wrong answer: empty, blank, or to another problem; or any answer to smalltalk."""
    reply = rng.choice((other.reply, other.reply, other.answer, other.prompt, "", " ", "\n"))
    if rng.random() < 0.5:
        return lesson(problem, reply)
    return lesson_of_smalltalk(rng.choice([entry for entry in SMALLTALK if not entry.held_out]).prompt, reply, rng)


def lesson_of_smalltalk(prompt: str, reply: str, rng: random.Random) -> Lesson:
    """All replies to smalltalk are wrong from the first token, including the end of an empty reply."""
    written = prompt if rng.random() < 0.5 else prompt[:1].upper() + prompt[1:]
    if written[-1].isalnum() and rng.random() < 0.5:
        written += rng.choice(".!?")
    question = [BOS, USER, *text_ids(written), END, ASSISTANT]
    return Lesson([*question, *text_ids(reply), END][:CONTEXT_TOKENS], len(question), len(question), False)


def collect(family: Path, work: Path, threads: int) -> None:
    """Write the tiers' replies to training problems. Existing files are kept."""
    for tier, count in PER_TIER.items():
        for name, share, temperature in (("greedy", 1 - SAMPLED_SHARE, 0.0), ("sampled", SAMPLED_SHARE, 0.7)):
            path = work / f"answers-{tier}-{name}.jsonl"
            if path.exists():
                continue
            seed = SEED * 100 + len(tier) + len(name)
            source = tasks.stream(seed, held_out=False)
            problems = [next(source) for _ in range(round(count * share))]
            answered = answers.answer_all(family / tier, tier, problems, temperature=temperature, threads=threads)
            answers.write(path.with_suffix(".tmp"), answered)
            path.with_suffix(".tmp").replace(path)
        path = work / f"smalltalk-{tier}.jsonl"
        if not path.exists():
            problems = [
                tasks.Problem("smalltalk", 1, entry.prompt, "", "", entry.prompt)
                for entry in SMALLTALK
                if not entry.held_out
            ]
            answered = answers.answer_all(family / tier, tier, problems * 3, temperature=0.7, threads=threads)
            answers.write(path.with_suffix(".tmp"), answered)
            path.with_suffix(".tmp").replace(path)


def lessons(work: Path) -> list[Lesson]:
    """All lessons, in random order."""
    rng = random.Random(SEED)
    collected = [
        lesson(a.problem, a.reply) for path in sorted(work.glob("answers-*.jsonl")) for a in answers.read(path)
    ]
    source = tasks.stream(SEED, held_out=False)
    collected += [lesson(problem, problem.reply) for problem, _ in zip(source, range(RIGHT), strict=False)]
    collected += [
        lesson(problem, broken(problem.reply, problem.answer, rng))
        for problem, _ in zip(source, range(BROKEN), strict=False)
    ]
    collected += [misplaced(next(source), next(source), rng) for _ in range(MISPLACED)]
    for path in sorted(work.glob("smalltalk-*.jsonl")):
        collected += [lesson_of_smalltalk(a.problem.prompt, a.reply, rng) for a in answers.read(path)]
    rng.shuffle(collected)
    return collected


def train(family: Path, work: Path, threads: int) -> dict[str, object]:
    """Train the judge into family/judge; return the figures for the card."""
    work.mkdir(parents=True, exist_ok=True)
    collect(family, work, threads)
    torch.set_num_threads(threads)
    collected = lessons(work)
    model = LlamaForCausalLM.from_pretrained(str(family / BASE), dtype=torch.float32)
    opts, peaks = optimisers(model, MUON_LR, ADAM_LR), [MUON_LR, ADAM_LR]
    rng = random.Random(SEED + 1)
    total = BATCHES
    began, step, running, lessons_seen = time.monotonic(), 0, 0.0, 0
    with (work / "judge.jsonl").open("a") as log:
        for batch in itertools.islice(
            itertools.chain.from_iterable(batches(collected, rng) for _ in range(total)), total
        ):
            share = min(1.0, (step + 1) / WARMUP_STEPS, (total - step) / total)
            loss = loss_of(model, batch)
            learn(model, opts, peaks, share, loss)
            step, running, lessons_seen = step + 1, running + loss.item(), lessons_seen + len(batch)
            if step % 20 == 0:
                log.write(json.dumps({"step": step, "of": total, "loss": running / 20}) + "\n")
                log.flush()
                running = 0.0
    save(model, family / "judge", save_tokenizer)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "samples": lessons_seen,
        "right_share": sum(item.good for item in collected) / len(collected),
        "steps": step,
        "training_seconds": round(time.monotonic() - began),
        "threads": threads,
        "seed": SEED,
    }


def score_all(folder: Path, answered: list[Answered], threads: int = 2) -> list[float]:
    """The judge's raw scores of answers, computed by the production code."""
    import asyncio

    from judge_service.scorers import JudgedAnswer
    from judge_service.scorers.judge_model import BatchOptions, JudgeModelScorer
    from services.domain.requests import ChatMessage, ChatPrompt

    async def run() -> list[float]:
        scorer = JudgeModelScorer(folder, BatchOptions(64, 16_384), threads=threads, device="cpu")
        await scorer.start()
        items = [JudgedAnswer(ChatPrompt((ChatMessage("user", a.problem.prompt),)), a.reply, a.tier) for a in answered]
        scores = [raw.raw for raw in await scorer.score(items)]
        await scorer.close()
        return scores

    return asyncio.run(run())
