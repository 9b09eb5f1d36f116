"""Train the judge: it begins with the weights of the large tier's trunk and learns from right and wrong replies.

It is a language model over (prompt, answer) that gives wrong answers a low probability, without the solution. While a
reply agrees with the right one, the probability of its tokens is increased; that of the first wrong token is decreased
(unlikelihood training, Welleck et al., 2020); later tokens are ignored. The score of an answer is the probability of its
least likely token. Replies are the tiers' own, right ones, broken ones (a character changed, the end cut off, run on),
empty ones and those of another problem.
"""

import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from models.training import tasks, tokenizer
from models.training.answers import Answered, answer_all, read, write
from models.training.data import turn_ids
from models.training.hardware import autocast
from models.training.learning import CONTEXT_TOKENS, learn, optimisers, save, set_attention
from models.training.problems import Problem, is_correct
from models.training.rows import BOS, END, PAD, text_ids
from models.training.train import CPU

SEED = 41
BASE = "large-trunk"  # as costly as the medium tier, and knows more: who cannot solve a problem cannot judge it
PER_TIER = {"small": 6_000, "medium": 8_000, "large": 2_000}
SAMPLED_SHARE = 0.3  # of a tier's replies: drawn at temperature 0.7; the others are greedy
RIGHT, BROKEN, MISPLACED = 7_000, 5_000, 2_000  # replies that no tier gave
BY_LEVEL = (0.6, 0.8, 1.0, 1.3, 1.5)
BATCHES = 300
MUON_LR, ADAM_LR = 0.003, 3e-4
WARMUP_STEPS = 40
CHECKPOINT_S = 240
LOG_STEPS = 20
TOKENS_PER_BATCH = 8192
WRONG_WEIGHT = 5.0  # weight of a wrong token relative to a correct one, because there are few


@dataclass(frozen=True, slots=True)
class Lesson:
    """ids: the chat with the reply; reply_at: where the reply begins; good_until: tokens up to here agree with the right
    reply; good: whether the answer is right."""

    ids: list[int]
    reply_at: int
    good_until: int
    good: bool


def lesson(problem: Problem, reply: str) -> Lesson | None:
    """None for a right reply in other words than ours: it cannot be compared token by token."""
    good = is_correct(problem.answer, reply)
    if good and reply != problem.reply:
        return None
    prompt, right = turn_ids(problem)
    return lesson_of_ids([BOS, *prompt], right, [*text_ids(reply), END], good=good)


def lesson_of_ids(prompt: list[int], correct: list[int], given: list[int], *, good: bool) -> Lesson:
    """A reply `said` against the right one: token ids, each with the end token."""
    agree = next(
        (i for i, (a, b) in enumerate(zip(given, correct, strict=False)) if a != b), min(len(given), len(correct))
    )
    start = len(prompt)
    return Lesson([*prompt, *given][:CONTEXT_TOKENS], start, start + agree, good)


def broken(right: str, answer: str, rng: random.Random) -> str:
    """The correct reply with an error: a character changed, removed, doubled or swapped, the end cut, or text appended."""
    reply = list(right)
    at = rng.randrange(len(reply))
    kind = rng.randrange(6)
    if kind == 0:
        pool = "0123456789" if reply[at].isdigit() else "abcdefghijklmnopqrstuvwxyz"
        reply[at] = rng.choice(pool)
    elif kind == 1:
        del reply[at]
    elif kind == 2:
        reply.insert(at, reply[at])
    elif kind == 3 and at + 1 < len(reply):
        reply[at], reply[at + 1] = reply[at + 1], reply[at]
    elif kind == 4:
        reply += rng.choice((reply, list(f"\n{right}"), list(f", {answer}"), list(answer[-1:] * 3)))
    else:
        reply = reply[: max(1, at)]
    return "".join(reply)


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


def batches(collected: list[Lesson], rng: random.Random) -> Iterator[list[Lesson]]:
    """One epoch: batches of lessons of similar length, in random order."""
    order = sorted(collected, key=lambda item: (len(item.ids), rng.random()))
    grouped: list[list[Lesson]] = [[]]
    for item in order:
        if grouped[-1] and (len(grouped[-1]) + 1) * len(item.ids) > TOKENS_PER_BATCH:
            grouped.append([])
        grouped[-1].append(item)
    rng.shuffle(grouped)
    yield from grouped


def loss_of(model: LlamaForCausalLM, batch: list[Lesson]) -> torch.Tensor:
    """Mean of -log p over tokens that agree, and of -log(1 - p) over first wrong tokens."""
    width = max(len(item.ids) for item in batch)
    device = model.device
    ids = torch.tensor([item.ids + [PAD] * (width - len(item.ids)) for item in batch], device=device)
    set_attention(model, width)
    with autocast(device):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H)
        place = torch.arange(1, width, device=device)[None, :]  # of the predicted token
        reply_at = torch.tensor([item.reply_at for item in batch], device=device)[:, None]
        length = torch.tensor([len(item.ids) for item in batch], device=device)[:, None]
        good_until = torch.tensor([item.good_until for item in batch], device=device)[:, None]
        agrees = (place >= reply_at) & (place < torch.minimum(good_until, length))
        breaks = (place == good_until) & (place < length)
        taught = agrees | breaks
        logits = model.lm_head(hidden[:, :-1][taught]).float()
    logp = torch.log_softmax(logits, dim=-1).gather(1, ids[:, 1:][taught][:, None])[:, 0]
    wrong = breaks[taught]
    against = torch.log1p(-logp[wrong].exp().clamp(max=1 - 1e-6))
    return -(logp[~wrong].sum() + WRONG_WEIGHT * against.sum()) / taught.sum()


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
