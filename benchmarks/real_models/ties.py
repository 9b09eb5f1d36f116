"""Whether a text is the same alone, eight at once, and with itself as draft; if not, that its tokens part at a near tie.

llama.cpp takes other kernels for other numbers of rows, and they round otherwise. So log-probabilities differ a little, and
where the two most likely tokens are closer than that, the other one is taken. Measured over all tokens before texts part: by
how much the difference of their log-probabilities changes. Where texts part: that difference, alone.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.real_models.generate import AT_ONCE, loaded, outputs
from benchmarks.real_models.prompts import MODELS, tasks
from penstock.types.prompts import ChatMessage, ChatPrompt, TokenPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.core import EngineCore
from penstock.worker_service.speculation.given_answer import GivenAnswer, RunAcceptance

PROMPTS, OUTPUT_TOKENS = 24, 64
_runs = itertools.count()


@dataclass(frozen=True, slots=True)
class Reply:
    """tokens, and for each the two most likely tokens' difference of log-probabilities."""

    tokens: list[int]
    gaps: list[float]


def measure() -> None:
    models = {model: _of(loaded(model)) for model in MODELS}
    figures = {"prompts": PROMPTS, "output_tokens": OUTPUT_TOKENS, "at_once": AT_ONCE, "models": models}
    print(report.write("real_models/ties", figures))


def _of(core: EngineCore) -> dict[str, Any]:
    texts = [task.text for task in tasks("humaneval")[:PROMPTS]]
    prompts = [tuple(core.tokenizer.encode(ChatPrompt((ChatMessage("user", text),)))) for text in texts]
    alone = [_replies(core, [prompt])[0] for prompt in prompts]
    drafted = [_replies(core, [prompt], reply.tokens)[0] for prompt, reply in zip(prompts, alone, strict=True)]
    ways = {"at_once": _replies(core, prompts), "drafted": drafted}
    figures = {way: _compared(alone, replies) for way, replies in ways.items()}
    print(figures, flush=True)
    return figures


def _replies(core: EngineCore, prompts: Sequence[tuple[int, ...]], draft: Sequence[int] = ()) -> list[Reply]:
    replies, salt, acceptance = [Reply([], []) for _ in prompts], str(next(_runs)), RunAcceptance()

    def request(i: int) -> GenerationRequest:
        if draft:
            core.proposals.attach(f"{salt}-{i}", GivenAnswer(draft, acceptance, lambda: 0.0))
        sampling = SamplingParams(0.0, max_tokens=OUTPUT_TOKENS, top_logprobs=2)
        return GenerationRequest(f"{salt}-{i}", TokenPrompt(prompts[i]), sampling, cache_salt=salt)

    for name, output in outputs(core, map(request, range(len(prompts)))):
        if isinstance(output, TokenFrame):
            reply = replies[int(name.rpartition("-")[2])]
            reply.tokens.extend(output.token_ids)
            reply.gaps.extend(each.top[0].logprob - each.top[1].logprob for each in output.logprobs)
        else:
            core.proposals.forget(name)
    return replies


def _compared(alone: Sequence[Reply], others: Sequence[Reply]) -> dict[str, Any]:
    changes, parted = list[float](), list[float]()
    for one, other in zip(alone, others, strict=True):
        pairs = list(zip(one.tokens, other.tokens, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        changes += [abs(a - b) for a, b in zip(one.gaps[:at], other.gaps[:at], strict=True)]
        if at < len(pairs):
            parted.append(round(one.gaps[at], 4))
    shares = dict(zip(("median", "p99", "most"), np.quantile(changes, (0.5, 0.99, 1.0)).round(4).tolist(), strict=True))
    return {"same": len(alone) - len(parted), "tokens": len(changes), "change": shares, "parted_at": sorted(parted)}
