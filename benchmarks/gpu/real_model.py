"""What only real weights show: that a GPU writes what a CPU writes; and tokens a second."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.gpu.measures import TimeBudget
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.subjects import Numbers, TorchSubject, started
from penstock.types.prompts import ChatMessage, ChatPrompt

TASKS = Path("examples/programs.jsonl")
PROMPTS, TOKENS = 16, 64  # that are compared
BATCHES = (1, 4, 8, 16, 64, 256)
EACH = 200  # tokens of each sequence whose steps are timed
PREFILL = 1024  # tokens of a prompt
DTYPES: tuple[Numbers, ...] = ("float32", "bfloat16")

Reply = list[tuple[int, float]]  # tokens, and how much more likely each was than the next (natural logarithm)


def exactness(shape: Shape, device: str, prompts: int = PROMPTS, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Greedy replies on the device against those of float32 on the CPU, by type of the numbers.

    same: replies that are equal to the last token. differing: where each of the others first differs, and how much more
    likely the CPU held its token than the next there: a near tie where the type cannot tell them apart.
    """
    texts = [json.loads(line)["prompt"] for line in TASKS.read_text().splitlines()[:prompts]]
    truth = _replies(shape, "cpu", "float32", texts, tokens)
    rows = list[dict[str, Any]]()
    for dtype in DTYPES:
        pairs = zip(truth, _replies(shape, device, dtype, texts, tokens), strict=True)
        differing = [place for pair in pairs if (place := first_difference(*pair)) is not None]
        same = len(texts) - len(differing)
        rows.append({"dtype": dtype, "replies": len(texts), "tokens": tokens, "same": same, "differing": differing})
    return rows


def rates(subject: TorchSubject, seed: int, budget: TimeBudget) -> dict[str, Any]:
    """Tokens a second of decode steps by batch, and of a prompt, by the shortest of some turns."""
    decode = dict[int, float]()
    for batch in BATCHES:
        turns = [] if budget.over else [subject.decode_step_s([EACH] * batch, seed + turn) for turn in range(2)]
        if times := [step_s for step_s in turns if step_s is not None]:
            decode[batch] = batch / min(times)
    prefill_s = min(subject.prefill_s(PREFILL, seed + turn) for turn in range(3))
    return {"decode_tokens_per_s": decode, "prefill_tokens_per_s": PREFILL / prefill_s}


def _replies(shape: Shape, device: str, dtype: Numbers, texts: Sequence[str], tokens: int) -> list[Reply]:
    assert shape.folder is not None
    with closing(started(shape, shape.folder, device, dtype)) as subject:
        return [_reply(subject, subject.core.tokenizer.encode(_chat(text)), tokens) for text in texts]


def _chat(text: str) -> ChatPrompt:
    return ChatPrompt((ChatMessage("user", text),))


def _reply(subject: TorchSubject, prompt: list[int], tokens: int) -> Reply:
    return [
        (token, at.top[0].logprob - at.top[1].logprob)
        for frame in subject.reply(prompt, tokens, ignore_eos=False)
        for token, at in zip(frame.token_ids, frame.logprobs, strict=True)
    ]


def first_difference(truth: Reply, other: Reply) -> dict[str, Any] | None:
    for i, ((token, lead), (another, _)) in enumerate(zip(truth, other, strict=False)):
        if token != another:
            return {"at": i, "lead": lead}
    return None if len(truth) == len(other) else {"at": min(len(truth), len(other)), "lead": None}
