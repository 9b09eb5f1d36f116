"""Train the tiers, one after the other; a broken run is taken up again at its last checkpoint.

Every model begins with what is there: small and medium with the first edition's weights, grown where they are larger, and the
large one with the medium tier's. Its trunk, of the medium tier's depth, learns most of what it knows at a quarter of the
cost; then layers are added. The judge begins with the trunk's weights.
"""

import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from models.training import tasks, tokenizer
from models.training.data import batches, turn_ids
from models.training.growth import grow
from models.training.hard import failed_oftener
from models.training.learning import config, learn, loss_of, optimisers, save
from models.training.problems import Problem
from models.training.rows import PAD, Batch
from models.training.scoring import exact_replies

TOKENS_PER_BATCH = 4096
LONG_SHARE = 0.05
WARMUP_STEPS = 200
CHECKPOINT_S = 240
LOG_STEPS = 50
PROBE_STEPS = 500
PROBE_PER_KIND = 2
PROGRESS = "progress.json"  # in the folder of a model that is to be trained on: the figures of its training so far
CPU = torch.device("cpu")
# How often levels 1 to 5 are drawn: at first; later by the small tier, for which hard ones are lost; later by the others.
EASY, MODEST, HARD = (3.0, 2.0, 1.0, 0.5, 0.3), (1.4, 1.2, 1.0, 0.7, 0.5), (0.6, 0.8, 1.0, 1.3, 1.5)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """One model's shape and training.

    hidden, layers, heads, kv_heads, mlp: the Llama shape.
    tokens: training tokens seen, padding left out; of these `easy_tokens` at the beginning are mostly easy problems, and
        over `decay_tokens` at the end the rate falls to nothing.
    grows_from: the folder that it begins with: `first/...` of the first edition, else of this training.
    focus: tasks that it still fails are drawn oftener.
    hard_after_tokens: from here on most problems are ones that the model it grows from fails; None: never.
    by_level: how often levels 1 to 5 are drawn after the easy tokens.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    grows_from: str
    tokens: int
    easy_tokens: int
    decay_tokens: int
    muon_lr: float
    adam_lr: float
    seed: int
    focus: bool
    hard_after_tokens: int | None = None
    by_level: tuple[float, ...] = HARD


RECIPES = {
    "small": Recipe(
        hidden=96, layers=2, heads=6, kv_heads=2, mlp=256, grows_from="first/small",
        tokens=28_000_000, easy_tokens=10_000_000, decay_tokens=20_000_000, muon_lr=0.02, adam_lr=4e-3, seed=31, focus=False,
        by_level=MODEST,
    ),
    "medium": Recipe(
        hidden=192, layers=6, heads=6, kv_heads=2, mlp=512, grows_from="first/large",
        tokens=11_000_000, easy_tokens=1_000_000, decay_tokens=9_000_000, muon_lr=0.01, adam_lr=1e-3, seed=34, focus=True,
    ),
    "large-trunk": Recipe(
        hidden=192, layers=6, heads=6, kv_heads=2, mlp=512, grows_from="medium",
        tokens=16_000_000, easy_tokens=0, decay_tokens=8_000_000, muon_lr=0.01, adam_lr=1e-3, seed=36, focus=True,
    ),
    "large": Recipe(
        hidden=192, layers=30, heads=6, kv_heads=2, mlp=512, grows_from="large-trunk",
        tokens=4_300_000, easy_tokens=0, decay_tokens=2_700_000, muon_lr=0.004, adam_lr=4e-4, seed=35, focus=True,
        hard_after_tokens=2_300_000,
    ),
}  # fmt: skip


def rate(recipe: Recipe, seen: int, step: int) -> float:
    """The share of the peak rate after `seen` tokens and `step` steps of these optimisers."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, (recipe.tokens - seen) / recipe.decay_tokens)


def weights(exact: dict[str, float]) -> dict[str, float]:
    """How much oftener a task is drawn for the share of its problems that is failed: from 0.5 (none) to 2 (all)."""
    return {task: 0.5 + 1.5 * (1.0 - share) for task, share in exact.items()}


def _loaded(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32)


def by_task(problems: list[Problem], right: list[bool]) -> dict[str, float]:
    results: dict[str, list[bool]] = defaultdict(list)
    for problem, good in zip(problems, right, strict=True):
        results[problem.task].append(good)
    return {task: sum(group) / len(group) for task, group in results.items()}


class Run:
    """One training run: its model, optimisers, and how far it is."""

    def __init__(self, name: str, work: Path, threads: int, device: torch.device = CPU) -> None:
        self.name, self.work, self.recipe, self.threads = name, work, RECIPES[name], threads
        torch.set_num_threads(threads)
        torch.manual_seed(self.recipe.seed)
        self.checkpoint, self.log = work / f"{name}.pt", work / f"{name}.jsonl"
        self.step, self.seen, self.cpu_s = 0, 0, 0.0
        self.exact: dict[str, float] = {}
        kept = work / name / PROGRESS
        if kept.exists():
            progress = json.loads(kept.read_text())
            self.step, self.seen, self.cpu_s = progress["steps"], progress["training_tokens"], progress["cpu_s"]
        self.begun_at_step = self.step
        grows_from = work / self.recipe.grows_from
        self.model = _loaded(work / name) if kept.exists() else grow(_loaded(grows_from), config(self.recipe))
        self.model.to(device)
        self.proxy = None if self.recipe.hard_after_tokens is None else _loaded(grows_from).to(device)
        self.opts = optimisers(self.model, self.recipe.muon_lr, self.recipe.adam_lr)
        self.peaks = [group["lr"] for opt in self.opts for group in opt.param_groups]
        self._cpu_from = time.process_time()
        self.probe = [
            tasks.make(task, level, f"probe {i}") for task, level in tasks.KINDS for i in range(PROBE_PER_KIND)
        ]
        if self.checkpoint.exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.model.device, weights_only=True)
        self.step, self.seen, self.cpu_s, self.exact = state["step"], state["seen"], state["cpu_s"], state["exact"]
        self.model.load_state_dict(state["model"])
        for opt, optimiser_state in zip(self.opts, state["opts"], strict=True):
            opt.load_state_dict(optimiser_state)

    def keep(self) -> None:
        """Write a checkpoint, whole or not at all."""
        state = {
            "step": self.step,
            "seen": self.seen,
            "cpu_s": self.spent_s(),
            "exact": self.exact,
            "model": self.model.state_dict(),
            "opts": [opt.state_dict() for opt in self.opts],
        }
        torch.save(state, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").replace(self.checkpoint)

    def spent_s(self) -> float:
        """CPU seconds, all threads together, runs before this one included."""
        return self.cpu_s + time.process_time() - self._cpu_from

    def source(self) -> Iterator[Batch]:
        """Batches from here on: easy at first, with more of the failed tasks if the recipe has it."""
        easy, hard = self._stage()
        by_level = EASY if easy else self.recipe.by_level
        seed = self.recipe.seed * 100_000 + self.step
        drawn = tasks.stream(seed, by_level=by_level, by_task=weights(self.exact) if self.recipe.focus else {})
        if hard and self.proxy is not None:
            drawn = failed_oftener(drawn, self.proxy)
        return batches(drawn, seed, TOKENS_PER_BATCH, LONG_SHARE)

    def _stage(self) -> tuple[bool, bool]:
        """Whether problems are mostly easy now, and whether they are mostly hard."""
        hard_after = self.recipe.hard_after_tokens
        return self.seen < self.recipe.easy_tokens, hard_after is not None and self.seen >= hard_after

    def measure(self) -> None:
        """The share of exact replies by task, on problems of the training split."""
        self.model.eval()
        right = exact_replies(self.model, [turn_ids(problem) for problem in self.probe], batch=16)
        self.model.train()
        self.exact = by_task(self.probe, right)

    def write(self, row: dict[str, object]) -> None:
        with self.log.open("a") as out:
            out.write(json.dumps(row) + "\n")

    def go(self, until_tokens: int | None = None) -> None:
        """Train to the end of the recipe, or to `until_tokens`."""
        total = min(self.recipe.tokens, until_tokens or self.recipe.tokens)
        if self.recipe.focus and not self.exact:
            self.measure()
        source, stage, losses = self.source(), self._stage(), list[float]()
        kept_at = logged_at = time.monotonic()
        while self.seen < total:
            batch = next(source)
            loss = loss_of(self.model, batch)
            learn(self.model, self.opts, self.peaks, rate(self.recipe, self.seen, self.step - self.begun_at_step), loss)
            losses.append(loss.item())
            self.step, self.seen = self.step + 1, self.seen + int((batch.input_ids != PAD).sum())
            if self.step % LOG_STEPS == 0:
                now = time.monotonic()
                pace = len(losses) * TOKENS_PER_BATCH / (now - logged_at)
                row = {
                    "step": self.step,
                    "seen": self.seen,
                    "loss": sum(losses) / len(losses),
                    "padded_tokens_per_s": round(pace),
                }
                self.write({**row, "cpu_s": round(self.spent_s())})
                losses, logged_at = [], now
            if self.step % PROBE_STEPS == 0:
                self.measure()
                mean = sum(self.exact.values()) / len(self.exact)
                self.write({"step": self.step, "seen": self.seen, "exact": round(mean, 3), "by_task": self.exact})
                source = self.source()
            if self._stage() != stage:
                source, stage = self.source(), self._stage()
            if time.monotonic() - kept_at > CHECKPOINT_S:
                self.keep()
                kept_at = time.monotonic()
        self.keep()


def train(
    name: str, work: Path, threads: int, until_tokens: int | None = None, device: torch.device = CPU
) -> dict[str, object]:
    """Train one model of RECIPES into work/name; return its figures. `until_tokens` ends it early (to try a recipe)."""
    work.mkdir(parents=True, exist_ok=True)
    run = Run(name, work, threads, device)
    run.go(until_tokens)
    run.measure()
    save(run.model, work / name, tokenizer.save)
    return {
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "training_tokens": run.seen,
        "steps": run.step,
        "cpu_s": round(run.spent_s()),
        "threads": threads,
        "device": device.type,
        "exact": sum(run.exact.values()) / len(run.exact),
        "recipe": dataclasses.asdict(run.recipe),
    }
