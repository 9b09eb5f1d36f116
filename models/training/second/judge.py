"""Train the second edition's judge: it begins with the small tier's weights and learns from right and wrong replies.

The method is the first edition's (`models/training/judge.py`): as long as a reply agrees with the right one its tokens
become likelier, the first token that does not becomes less likely. Replies are the tiers' own, right ones, broken ones (a
character changed, the end cut off, run on), empty ones and those of another problem.
"""

import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from models.training.data import BOS, END, text_ids
from models.training.judge import Lesson, batches, broken, lesson_of_ids, loss_of
from models.training.second import tasks, tokenizer
from models.training.second.answers import Answered, answer_all, read, write
from models.training.second.data import turn_ids
from models.training.second.problems import Problem, is_correct
from models.training.second.train import CPU
from models.training.train import learn, optimisers, save

SEED = 41
BASE = "small"  # what reads every answer has to be cheap
PER_TIER = {"small": 6_000, "medium": 8_000, "large": 2_000}
SAMPLED_SHARE = 0.3  # of a tier's replies: drawn at temperature 0.7; the others are greedy
RIGHT, BROKEN, MISPLACED = 7_000, 5_000, 2_000  # replies that no tier gave
BY_LEVEL = (0.6, 0.8, 1.0, 1.3, 1.5)
BATCHES = 600
MUON_LR, ADAM_LR = 0.01, 1e-3
WARMUP_STEPS = 60
CHECKPOINT_S = 240
LOG_STEPS = 20


def lesson(problem: Problem, reply: str) -> Lesson | None:
    """None for a right reply in other words than ours: it cannot be compared token by token."""
    good = is_correct(problem.answer, reply)
    if good and reply != problem.reply:
        return None
    prompt, right = turn_ids(problem)
    return lesson_of_ids([BOS, *prompt], right, [*text_ids(reply), END], good=good)


def misplaced(other: Problem, rng: random.Random) -> str:
    """A reply that does not belong here: another problem's, its question, or nothing."""
    return rng.choice((other.reply, other.reply, other.answer, other.prompt, "", " ", "\n"))


def collect(work: Path, threads: int) -> None:
    """Write the tiers' replies to training problems; what is there already is kept."""
    for tier, count in PER_TIER.items():
        for name, share, temperature in (("greedy", 1 - SAMPLED_SHARE, 0.0), ("sampled", SAMPLED_SHARE, 0.7)):
            path = work / f"answers-{tier}-{name}.jsonl"
            if not path.exists():
                source = tasks.stream(SEED * 100 + len(tier) * 10 + len(name), by_level=BY_LEVEL)
                problems = itertools.islice(source, round(count * share))
                write(path, answer_all(work / tier, tier, problems, temperature=temperature, threads=threads))


def lessons(answered: Iterator[Answered], seed: int, *, right: int, wrong: int, elsewhere: int) -> list[Lesson]:
    """All lessons, in random order: of the answers given, and of replies that no tier gave."""
    rng, source = random.Random(seed), tasks.stream(seed, by_level=BY_LEVEL)
    candidates = [lesson(a.problem, a.reply) for a in answered]
    candidates += [lesson(problem, problem.reply) for problem in itertools.islice(source, right)]
    candidates += [
        lesson(problem, broken(problem.reply, problem.answer, rng)) for problem in itertools.islice(source, wrong)
    ]
    candidates += [lesson(problem, misplaced(next(source), rng)) for problem in itertools.islice(source, elsewhere)]
    usable = [candidate for candidate in candidates if candidate is not None]
    rng.shuffle(usable)
    return usable


def train(work: Path, threads: int, total: int = BATCHES, device: torch.device = CPU) -> dict[str, object]:
    """Train the judge into work/judge; a checkpoint is taken up again. Returns the figures for the card."""
    collect(work, threads)
    torch.set_num_threads(threads)
    answered = itertools.chain.from_iterable(read(path) for path in sorted(work.glob("answers-*.jsonl")))
    collected = lessons(answered, SEED, right=RIGHT, wrong=BROKEN, elsewhere=MISPLACED)
    model = LlamaForCausalLM.from_pretrained(str(work / BASE), dtype=torch.float32).to(device)
    opts, peaks = optimisers(model, MUON_LR, ADAM_LR), [MUON_LR, ADAM_LR]
    step, cpu_s, cpu_from = 0, 0.0, time.process_time()
    checkpoint = work / "judge.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        step, cpu_s = state["step"], state["cpu_s"]
        model.load_state_dict(state["model"])
        for opt, optimiser_state in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(optimiser_state)
    rng, running, kept_at = random.Random(SEED + step), 0.0, time.monotonic()
    epochs = itertools.chain.from_iterable(batches(collected, rng) for _ in itertools.count())
    with (work / "judge.jsonl").open("a") as log:
        for batch in itertools.islice(epochs, total - step):
            share = min(1.0, (step + 1) / WARMUP_STEPS, (total - step) / total)
            loss = loss_of(model, batch)
            learn(model, opts, peaks, share, loss)
            step, running = step + 1, running + loss.item()
            if step % LOG_STEPS == 0:
                log.write(json.dumps({"step": step, "of": total, "loss": running / LOG_STEPS}) + "\n")
                log.flush()
                running = 0.0
            if time.monotonic() - kept_at > CHECKPOINT_S or step == total:
                kept_at = time.monotonic()
                state = {"step": step, "cpu_s": cpu_s + time.process_time() - cpu_from, "model": model.state_dict()}
                torch.save({**state, "opts": [opt.state_dict() for opt in opts]}, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
    save(model, work / "judge", tokenizer.save)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "lessons": len(collected),
        "right_share": sum(item.good for item in collected) / len(collected),
        "steps": step,
        "cpu_s": round(cpu_s + time.process_time() - cpu_from),
        "threads": threads,
        "device": device.type,
        "seed": SEED,
    }
