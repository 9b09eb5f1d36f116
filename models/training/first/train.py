"""Train one tier of the family: `python -m models.training.train small|medium|large`.

The rate warms up, stays, and falls linearly to nothing at the end. What a tier is when its rate begins to fall is its trunk:
another tier can grow out of it. Everything is drawn from the seed.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from models.training import tokenizer
from models.training.first import tasks
from models.training.first.data import batches, turn_ids
from models.training.growth import grow
from models.training.learning import config, learn, loss_of, optimisers, save
from models.training.rows import PAD, Batch
from models.training.scoring import exact_replies


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """One tier's shape and training.

    hidden, layers, heads, kv_heads, mlp: the Llama shape.
    tokens: training tokens seen, padding left out; of these `easy_tokens` at the beginning are mostly easy problems, and
        over `decay_tokens` at the end the rate falls.
    muon_lr, adam_lr: the two peak learning rates.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    tokens: int
    easy_tokens: int
    decay_tokens: int
    muon_lr: float
    adam_lr: float
    seed: int
    grows_from: str = ""  # the tier whose trunk this one begins with; else random weights


RECIPES = {
    "small": Recipe(64, 2, 4, 2, 192, 36_000_000, 9_000_000, 12_000_000, 0.02, 4e-3, 11),
    "medium": Recipe(128, 4, 4, 2, 384, 37_800_000, 20_000_000, 1_000_000, 0.02, 3e-3, 12),
    "large": Recipe(192, 6, 6, 2, 512, 36_000_000, 0, 14_000_000, 0.02, 2e-3, 13, grows_from="medium"),
}
TOKENS_PER_BATCH = 8192
LONG_SHARE = 0.06  # of the batches: several turns of one chat, up to the whole context
WARMUP_STEPS = 200
# How often problems of levels 1 to 5 are drawn: at the beginning, and after `easy_tokens`.
EASY, ALL = (4.0, 2.0, 1.0, 0.5, 0.25), (0.7, 0.9, 1.0, 1.2, 1.4)


def rate(recipe: Recipe, seen: int, step: int) -> float:
    """The share of the peak rate after `seen` tokens."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * max(0.0, min(1.0, (recipe.tokens - seen) / recipe.decay_tokens))


def _source(seed: int, by_level: tuple[float, ...]) -> Iterator[Batch]:
    weights = {(task, level): by_level[level - 1] for task in tasks.TASKS for level in tasks.LEVELS}
    return batches(seed, TOKENS_PER_BATCH, long_share=LONG_SHARE, weights=weights)


def _begin(recipe: Recipe, work: Path) -> LlamaForCausalLM:
    if not recipe.grows_from:
        return LlamaForCausalLM(config(recipe))
    trunk = work / f"{recipe.grows_from}.trunk"
    if not trunk.exists():
        raise FileNotFoundError(f"{trunk}: train {recipe.grows_from} first, this tier grows out of it")
    return grow(LlamaForCausalLM.from_pretrained(str(trunk), dtype=torch.float32), config(recipe))


def train(name: str, folder: Path, work: Path, *, threads: int) -> dict[str, object]:
    """Train tier `name` into `folder`; a checkpoint in `work` is taken up again. Returns the figures for the card."""
    recipe = RECIPES[name]
    total = recipe.tokens
    torch.set_num_threads(threads)
    torch.manual_seed(recipe.seed)
    model = _begin(recipe, work)
    opts = optimisers(model, recipe.muon_lr, recipe.adam_lr)
    peaks = [group["lr"] for opt in opts for group in opt.param_groups]
    work.mkdir(parents=True, exist_ok=True)
    checkpoint, log = work / f"{name}.pt", work / f"{name}.jsonl"
    step, tokens_seen, spent_s = 0, 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        step, tokens_seen, spent_s = state["step"], state["seen"], state["spent_s"]
        model.load_state_dict(state["model"])
        for opt, optimiser_state in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(optimiser_state)
    probe = [turn_ids(p) for p in tasks.held_out(300, seed=99)]
    levels: tuple[float, ...] = ()
    source: Iterator[Batch] = iter(())
    began, since, running = time.monotonic(), time.monotonic(), 0.0
    while tokens_seen < total:
        due = EASY if tokens_seen < recipe.easy_tokens else ALL
        if due != levels:
            levels, source = due, _source(recipe.seed * 1000 + step, due)
        batch = next(source)
        share = rate(recipe, tokens_seen, step)
        loss = loss_of(model, batch)
        learn(model, opts, peaks, share, loss)
        trunk_before = tokens_seen < total - recipe.decay_tokens
        step, tokens_seen = step + 1, tokens_seen + int((batch.input_ids != PAD).sum())
        if trunk_before and tokens_seen >= total - recipe.decay_tokens:
            save(model, work / f"{name}.trunk", tokenizer.save)
        running += loss.item()
        if step % 250 == 0 or tokens_seen >= total:
            row = {
                "step": step,
                "seen": tokens_seen,
                "loss": running / 250,
                "spent_s": spent_s + time.monotonic() - began,
            }
            running = 0.0
            if step % 1000 == 0 or tokens_seen >= total:
                row["exact"] = sum(exact_replies(model, probe)) / len(probe)
            with log.open("a") as out:
                out.write(json.dumps(row) + "\n")
        if time.monotonic() - since > 600 or tokens_seen >= total:
            since = time.monotonic()
            optimiser_state = {
                "step": step,
                "seen": tokens_seen,
                "spent_s": spent_s + time.monotonic() - began,
                "model": model.state_dict(),
                "opts": [opt.state_dict() for opt in opts],
            }
            torch.save(optimiser_state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    save(model, folder, tokenizer.save)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens": tokens_seen,
        "steps": step,
        "training_seconds": round(spent_s + time.monotonic() - began),
        "threads": threads,
        "recipe": dataclasses.asdict(recipe),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tier", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(".cache/training"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    figures = train(args.tier, args.out, args.work, threads=args.threads)
    (args.work / f"{args.tier}.figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
