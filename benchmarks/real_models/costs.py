"""CPU seconds of a prompt token and of an output token, by model, side by side on one machine.

Answers come from many hours and several machines. What systems cost is computed from their tokens and these figures, so that
models are compared on equal terms. As where answers are generated: one thread, AT_ONCE replies in a batch.

`drafts` measures what an escalated answer costs: the large model answers with the small one's answers as drafts, which fail
examples of their prompts, and without, in turns, every GROUP of prompts. Where texts differ, see `ties`.
"""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.real_models.generate import AT_ONCE, Asker, Store, answers, loaded, outputs
from benchmarks.real_models.prompts import MAX_TOKENS, MODELS, Set, Task, tasks
from benchmarks.real_models.records import RUN_S, passed
from penstock.judge_service.scorers.code.examples import examples_in
from penstock.judge_service.scorers.code.sandbox.bubblewrap import Sandbox
from penstock.types.prompts import ChatMessage, ChatPrompt, TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.speculation.given_answer import GivenAnswer, RunAcceptance

FILE = report.RESULTS / "real_models" / "costs.json"
DRAFTS = report.RESULTS / "real_models" / "drafts.json"
OUTPUT_TOKENS, ROUNDS = 65, 3
DRAFTED: Set = "humaneval"
GROUP = 16


@dataclass(frozen=True, slots=True)
class TokenCost:
    """CPU seconds of a token: of prompts, and of output."""

    prompt_s: float
    output_s: float

    def of(self, tokens: Sequence[float]) -> float:
        """tokens: of a prompt, and of its answer."""
        return self.prompt_s * tokens[0] + self.output_s * tokens[1]


def read_costs() -> dict[str, TokenCost]:
    """By model. Raises: OSError: They were not measured."""
    return {model: TokenCost(**each) for model, each in json.loads(FILE.read_text())["models"].items()}


def measure() -> None:
    """In rounds over all models, each with prompts that no round had before."""
    cores = {model: loaded(model) for model in MODELS}
    prompts = iter([*tasks("humaneval"), *tasks("gsm8k")])
    costs: dict[str, list[TokenCost]] = {model: [] for model in MODELS}
    for _ in range(ROUNDS):
        some = [[next(prompts).text for _ in range(AT_ONCE)] for _ in range(2)]
        for model, core in cores.items():
            read = run_all(core, [Job(text, 1) for text in some[0]])
            ran = run_all(core, [Job(text, OUTPUT_TOKENS) for text in some[1]])
            prompt_s = read.cpu_s / read.prompt_tokens
            costs[model].append(TokenCost(prompt_s, (ran.cpu_s - prompt_s * ran.prompt_tokens) / ran.output_tokens))
            print(model, costs[model][-1], flush=True)
    medians = {
        model: TokenCost(*(statistics.median(of) for of in zip(*((c.prompt_s, c.output_s) for c in each), strict=True)))
        for model, each in costs.items()
    }
    rounds = {model: [asdict(cost) for cost in each] for model, each in costs.items()}
    models = {model: asdict(cost) for model, cost in medians.items()}
    report.write("real_models/costs", {"models": models, "rounds": rounds})


def read_drafts() -> dict[str, dict[tuple[str, str], float]]:
    """By large model, then small model and set: the CPU of an answer of the large one with a rejected answer of the small one
    as draft, over its CPU without. Empty where it was not measured."""
    if not DRAFTS.is_file():
        return {}
    figures = json.loads(DRAFTS.read_text())
    return {figures["large"]: {(figures["small"], figures["set"]): figures["cpu"][0]}}


def measure_drafts() -> None:
    """The small model's answers that are not known yet are generated before."""
    store, (small, large) = Store(), MODELS[:2]
    some = tasks(DRAFTED)
    Asker(store).ask(small, answers(some))
    rejected = asyncio.run(_rejected(some, store.read(small, "answer")))
    core, acceptance = loaded(large), RunAcceptance()
    groups = list[dict[str, Any]]()
    for number, first in enumerate(range(0, len(rejected), GROUP)):
        group = rejected[first : first + GROUP]
        seconds, texts = dict[str, float](), dict[str, list[tuple[int, ...]]]()
        for way in ("plain", "drafted") if number % 2 else ("drafted", "plain"):
            drafts = [core.tokenizer.encode_text(text) if way == "drafted" else () for _, text in group]
            jobs = [Job(task.text, MAX_TOKENS[task.set], draft) for (task, _), draft in zip(group, drafts, strict=True)]
            ran = run_all(core, jobs, acceptance)
            seconds[way], texts[way] = ran.cpu_s, ran.outputs
        same = sum(plain == drafted for plain, drafted in zip(texts["plain"], texts["drafted"], strict=True))
        took = {f"{way}_s": round(s, 1) for way, s in seconds.items()}
        groups.append({"prompts": len(group), "same": same, **took})
        print(groups[-1], flush=True)
    counts = core.proposals.of_sources
    figures = {
        "small": small,
        "large": large,
        "set": DRAFTED,
        "at_once": AT_ONCE,
        "cpu": _ratio(groups),
        "accepted": counts.accepted,
        "verified": counts.verified,
        "groups": groups,
    }
    print(figures["cpu"], report.write("real_models/drafts", figures))


async def _rejected(some: Sequence[Task], known: Mapping[str, Mapping[str, Any]]) -> list[tuple[Task, str]]:
    """The tasks that show examples, and their answers that fail one."""
    sandbox = Sandbox(RUN_S)
    await sandbox.start()
    rejected = list[tuple[Task, str]]()
    for task in some:
        shown, text = examples_in(task.text), known[task.id]["text"]
        if shown and await passed(task, text, shown, sandbox) < len(shown):
            rejected.append((task, text))
    return rejected


def _ratio(groups: Sequence[Mapping[str, float]]) -> list[float]:
    """(ratio, low, high): 95 % by bootstrap over groups."""
    drafted, plain = (np.array([each[name] for each in groups]) for name in ("drafted_s", "plain_s"))
    rows = np.random.default_rng(1).integers(0, len(groups), (2_000, len(groups)))
    drawn = drafted[rows].sum(axis=1) / plain[rows].sum(axis=1)
    return [round(float(each), 3) for each in (drafted.sum() / plain.sum(), *np.quantile(drawn, (0.025, 0.975)))]


@dataclass(frozen=True, slots=True)
class Job:
    """draft: tokens; empty for none."""

    text: str
    max_tokens: int
    draft: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Ran:
    """outputs: tokens of each answer, in the order of the prompts. gaps: if requested, for each token by
    how much the log-probabilities of the two most likely ones differ. cpu_s: of the engine's thread."""

    prompt_tokens: int
    outputs: list[tuple[int, ...]]
    gaps: list[list[float]]
    cpu_s: float

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.outputs))


def run_all(
    core: EngineCore, jobs: Sequence[Job], acceptance: RunAcceptance | None = None, *, with_gaps: bool = False
) -> Ran:
    """Answer all, greedily, AT_ONCE at a time, with no KV of earlier prompts. acceptance: of the drafts."""
    prompts = [core.tokenizer.encode(ChatPrompt((ChatMessage("user", each.text),))) for each in jobs]
    answered: list[list[int]] = [[] for _ in jobs]
    gaps: list[list[float]] = [[] for _ in jobs]
    salt, began_s = str(next(_runs)), time.thread_time()

    def price() -> float:
        return core.proposals.row_price(len(core.scheduler.running))

    def request(i: int) -> GenerationRequest:
        if acceptance is not None and jobs[i].draft:
            core.proposals.attach(f"{salt}-{i}", GivenAnswer(jobs[i].draft, acceptance, price))
        sampling = SamplingParams(0.0, max_tokens=jobs[i].max_tokens, top_logprobs=2 if with_gaps else None)
        return GenerationRequest(f"{salt}-{i}", TokenPrompt(tuple(prompts[i])), sampling, cache_salt=salt)

    for name, output in outputs(core, map(request, range(len(jobs)))):
        if isinstance(output, TokenFrame):
            number = int(name.rpartition("-")[2])
            answered[number] += output.token_ids
            gaps[number] += (each.top[0].logprob - each.top[1].logprob for each in output.logprobs)
        else:
            core.proposals.forget(name)
    cpu_s = time.thread_time() - began_s
    return Ran(sum(map(len, prompts)), [tuple(each) for each in answered], gaps, cpu_s)


_runs = itertools.count()
