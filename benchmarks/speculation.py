"""Tokens per second of the shipped large model alone, with static drafts, and with drafts chosen while it runs.

In the engine's own process, one thread, greedy replies to held-out prompts; all contenders in turns, in rounds. Static: one
model with one window in every step. Adaptive: model and window chosen by measured speed and acceptance, with the compiled
loop of the small models or without it ("stepwise").
"""

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.spread import interval, median_and_range
from models.training import tasks
from models.training.answers import chat_of
from penstock.services.clock import SystemClock
from penstock.services.domain.speculation.choice import CHOSEN_STEPS, ChainCandidate, Chooser, tokens_per_s
from penstock.types.prompts import TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.engine.draft_loading import adaptive_drafter
from penstock.worker_service.engine.draft_model import DraftModel
from penstock.worker_service.engine.torch.engine import TorchEngineOptions, TorchModel, torch_core
from penstock.worker_service.speculation.adaptive import AdaptiveDrafter

FAMILY = Path("models/family")
TARGET, DRAFTERS = "large", ("small", "medium")
BATCHES, WINDOWS, MAX_WINDOW = (1, 4, 8, 16, 32, 64), (3, 7), 7
QUICK_BATCHES, QUICK_WINDOWS, QUICK_ROUNDS = (1, 16), (7,), 2
OUTPUT_TOKENS = 64
LEAST_PROMPTS = 24
SEED = 15
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)


class _Static(Chooser):
    """Always the same candidate."""

    def fix(self, candidate: ChainCandidate) -> "_Static":
        self.current = candidate
        return self

    def choose(self, replies: int, missing: Callable[[int], int]) -> ChainCandidate | None:
        chosen_for, steps = self._chosen_for
        if replies != chosen_for or not steps:  # what follows from the choice is as fresh as the adaptive one's
            self._known.clear()
            steps = CHOSEN_STEPS
        self._chosen_for = replies, steps - 1
        return self.current

    def least(self, replies: int) -> float:
        return 0.0

    def explore(self, replies: int, missing: Callable[[Seq[int]], Seq[int]]) -> ChainCandidate | None:
        return None


@dataclass(frozen=True, slots=True)
class _Result:
    """One run: replies, and tokens per second with and without the steps that read prompts.

    predicted_tokens_per_s: the rate of such decode steps that the drafter predicts at the end; None without a drafter.
    """

    replies: list[tuple[int, ...]]
    tokens_per_s: float
    decode_tokens_per_s: float
    predicted_tokens_per_s: float | None


def _core(drafters: tuple[str, ...], *, compiled: bool = True) -> EngineCore:
    most = max(BATCHES)
    options = TorchEngineOptions(FAMILY / TARGET, TARGET, kv_tokens=32_768, max_running=most, max_step_tokens=1024)
    core, _ = torch_core(options, SystemClock())
    if drafters:
        loaded = [TorchModel(FAMILY / name, replace(options, compiled=compiled)) for name in drafters]
        core.proposals.drafter = adaptive_drafter(core, loaded, core.scheduler.pool.count, MAX_WINDOW)
    return core


def _contenders(windows: tuple[int, ...]) -> dict[str, EngineCore]:
    cores = {"target alone": _core(())}
    for name in DRAFTERS:
        for window in windows:
            core = cores[f"{name}, {window}"] = _core((name,))
            drafter = core.proposals.drafter
            assert isinstance(drafter, AdaptiveDrafter)
            estimates = [model.estimate for model in drafter.models]
            drafter.chooser = _Static(drafter.chooser.target, estimates, MAX_WINDOW).fix(ChainCandidate((0,), window))
    cores["adaptive, stepwise"] = _core(DRAFTERS, compiled=False)
    cores["adaptive"] = _core(DRAFTERS)
    return cores


def _run(core: EngineCore, prompts: list[list[int]], batch: int) -> _Result:
    """Serve all prompts, `batch` at once."""
    waiting, replies = list(enumerate(prompts)), [list[int]() for _ in prompts]
    active = set[int]()
    predicted, decoded, decode_s = None, 0, 0.0
    began_s = time.thread_time()
    while waiting or not core.idle:
        while waiting and len(core.scheduler.running) + len(core.scheduler.waiting) < batch:
            i, ids = waiting.pop(0)
            core.add(GenerationRequest(f"r{i}", TokenPrompt(tuple(ids)), GREEDY), ids)
            active.add(i)
        reads_prompts = not all(replies[i] for i in active)
        full = len(active) == batch  # the prediction is for that many
        step_s, tokens = time.thread_time(), 0
        for name, event in core.step():
            if isinstance(event, TokenFrame):
                replies[int(name[1:])] += event.token_ids
                tokens += len(event.token_ids)
            else:
                active.remove(int(name[1:]))
        if full and not reads_prompts:
            decoded, decode_s = decoded + tokens, decode_s + time.thread_time() - step_s
        drafter = core.proposals.drafter
        if waiting and isinstance(drafter, AdaptiveDrafter):
            chooser = drafter.chooser
            predicted = tokens_per_s(batch, chooser.target, chooser.models, chooser.current)
    seconds = time.thread_time() - began_s
    rate = sum(map(len, replies)) / seconds
    return _Result([tuple(reply) for reply in replies], rate, decoded / decode_s if decode_s else rate, predicted)


def _ratio(rates: dict[str, list[float]], other: str) -> dict[str, float]:
    """How many times faster the adaptive choice is than another contender, over the rounds, each with a ratio of its own."""
    return interval([own / theirs for own, theirs in zip(rates["adaptive"], rates[other], strict=True)])


def measure(batches: tuple[int, ...], windows: tuple[int, ...], rounds: int) -> dict[str, Any]:
    cores = _contenders(windows)
    tokenizer = cores["target alone"].tokenizer
    rows = list[dict[str, Any]]()
    for batch in batches:
        questions = tasks.held_out(max(LEAST_PROMPTS, 2 * batch), seed=SEED)
        prompts = [tokenizer.encode(chat_of(q)) for q in questions]
        rates: dict[str, list[float]] = {name: [] for name in cores}
        decode_rates: dict[str, list[float]] = {name: [] for name in cores}
        differing: dict[str, int] = dict.fromkeys(cores, 0)
        errors: list[float] = []
        for core in cores.values():
            _run(core, prompts[: LEAST_PROMPTS // 2], batch)  # caches and estimates settle
        for _ in range(rounds):
            reference = _run(cores["target alone"], prompts, batch)
            for name, core in cores.items():
                result = reference if core is cores["target alone"] else _run(core, prompts, batch)
                rates[name].append(result.tokens_per_s)
                pairs = zip(result.replies, reference.replies, strict=True)
                differing[name] = max(differing[name], sum(own != other for own, other in pairs))
                decode_rates[name].append(result.decode_tokens_per_s)
                if name == "adaptive" and result.predicted_tokens_per_s is not None:
                    errors.append(abs(result.predicted_tokens_per_s / result.decode_tokens_per_s - 1))
        medians = {name: statistics.median(values) for name, values in rates.items()}
        static = {name: value for name, value in medians.items() if "," in name and "adaptive" not in name}
        best = max(static, key=lambda name: static[name])
        drafter = cores["adaptive"].proposals.drafter
        assert isinstance(drafter, AdaptiveDrafter)
        rows.append(
            {
                "batch": batch,
                "target_alone_tokens_per_s": medians["target alone"],
                "best_static": best,
                "best_static_tokens_per_s": max(static[best], medians["target alone"]),
                "adaptive_tokens_per_s": medians["adaptive"],
                "adaptive_stepwise_tokens_per_s": medians["adaptive, stepwise"],
                "adaptive_by_target_alone": _ratio(rates, "target alone"),
                "adaptive_by_best_static": _ratio(rates, best),
                "decode_steps_adaptive_by_target_alone": _ratio(decode_rates, "target alone"),
                "chain_at_the_end": drafter.current[0],
                "window_at_the_end": drafter.current[1],
                "prediction_error": statistics.mean(errors),
                "differing_replies": differing,
                "replies": len(prompts),
                "tokens_per_s": rates,
                "decode_tokens_per_s": decode_rates,
            }
        )
        decode_ratio = _ratio(decode_rates, "target alone")["mean"]
        print(
            f"{batch:>3} at once: alone {medians['target alone']:7.0f}  best static {static[best]:7.0f} ({best})  "
            f"adaptive {medians['adaptive']:7.0f}  stepwise {medians['adaptive, stepwise']:7.0f} tokens/s  "
            f"{drafter.current}  differing {differing['adaptive']} of {len(prompts)}  decode steps {decode_ratio:.2f}x",
            flush=True,
        )
    adaptive = cores["adaptive"].proposals.drafter
    assert isinstance(adaptive, AdaptiveDrafter)
    error = statistics.mean(row["prediction_error"] for row in rows)
    print(
        f"predicted tokens per second of decode steps: {100 * error:.1f} % off on average, at most 10 % wanted",
        flush=True,
    )
    return {
        "mean_prediction_error": error,
        "prediction_within_10_percent": error <= 0.1,
        "target": TARGET,
        "drafters": {
            m.name: {"compiled": isinstance(m.model, DraftModel) and m.model.compiled} for m in adaptive.models
        },
        "seed": SEED,
        "rounds": rounds,
        "output_tokens": OUTPUT_TOKENS,
        "threads": 1,
        "batches": rows,
    }


def _write(figures: dict[str, Any]) -> None:
    path = report.write("speculation", figures)
    names = list(figures["batches"][0]["tokens_per_s"])
    series = {name: [median_and_range(row["tokens_per_s"][name]) for row in figures["batches"]] for name in names}
    groups = [f"{row['batch']} at once" for row in figures["batches"]]
    title = "Output tokens per second, shipped large model with drafts, one CPU thread"
    print(f"{path}\n{report.bars('speculation', title, groups, series, 'tokens per second')}")


def run(rounds: int) -> None:
    _write(measure(BATCHES, WINDOWS, rounds))


def run_quick(rounds: int) -> None:
    _write(measure(QUICK_BATCHES, QUICK_WINDOWS, min(rounds, QUICK_ROUNDS)))
