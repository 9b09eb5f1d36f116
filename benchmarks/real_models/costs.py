"""CPU seconds of a prompt token and of an output token, by model, side by side on one machine.

Answers come from many hours and several machines. What systems cost is computed from their tokens and these figures, so that
models are compared on equal terms. As where answers are generated: one thread, AT_ONCE replies in a batch.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks import report
from benchmarks.real_models.generate import AT_ONCE, loaded
from benchmarks.real_models.prompts import MODELS, tasks
from penstock.types.prompts import ChatMessage, ChatPrompt, TokenPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import EngineFinished
from penstock.worker_service.engine.core import EngineCore

FILE = report.RESULTS / "real_models" / "costs.json"
OUTPUT_TOKENS, ROUNDS = 65, 3


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
            read, _, read_s = _run(core, some[0], 1)
            inputs, outputs, all_s = _run(core, some[1], OUTPUT_TOKENS)
            prompt_s = read_s / read
            costs[model].append(TokenCost(prompt_s, (all_s - prompt_s * inputs) / outputs))
            print(model, costs[model][-1], flush=True)
    medians = {
        model: TokenCost(*(statistics.median(of) for of in zip(*((c.prompt_s, c.output_s) for c in each), strict=True)))
        for model, each in costs.items()
    }
    rounds = {model: [asdict(cost) for cost in each] for model, each in costs.items()}
    models = {model: asdict(cost) for model, cost in medians.items()}
    report.write("real_models/costs", {"models": models, "rounds": rounds})


def _run(core: EngineCore, texts: Sequence[str], max_tokens: int) -> tuple[int, int, float]:
    """(prompt tokens, output tokens, CPU seconds) of a batch."""
    inputs = outputs = ended = 0
    for number, text in enumerate(texts):
        tokens = core.tokenizer.encode(ChatPrompt((ChatMessage("user", text),)))
        inputs += len(tokens)
        sampling = SamplingParams(0.0, max_tokens=max_tokens)
        core.add(GenerationRequest(f"{max_tokens}-{number}", TokenPrompt(tuple(tokens)), sampling), tokens)
    began_s = time.thread_time()
    while ended < len(texts):
        for _, output in core.step():
            if isinstance(output, Exception):
                raise output
            if isinstance(output, EngineFinished):
                ended, outputs = ended + 1, outputs + output.usage.output_tokens
    return inputs, outputs, time.thread_time() - began_s
