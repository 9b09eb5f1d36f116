"""The pause when a reply moves between SGLang servers: three methods, in turns, over prompt lengths.

recompute: the target computes prompt and reply. store: it loads KV from the shared store after the source has stopped.
move: the method of Penstock; the target prefetches while the source decodes, and only then the source stops.
"""

import asyncio
import json
import logging
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.spread import median_and_range
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.interface import EngineEvent
from penstock.worker_service.engine.sglang import moves as moves_module
from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.engine.sglang.server_link import SglangEngineOptions
from tests.support.sglang import sglang_pair

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "family" / "large"
LENGTHS = (200, 400, 800, 1600)  # prompt tokens, about; the model's context is 2,048
WAYS = ("recompute", "store", "move")
BEFORE, BEHIND = 40, 40  # output tokens at the source before it is to move, and compared at the target
SEED = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


class _Told(logging.Handler):
    """The engines' log about the origin of KV: (loaded, present, computed) of the last message of each kind."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.last: dict[str, tuple[int, int, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and len(record.args) == 5:
            _, what, *counts = record.args
            loaded, present, computed = (int(str(count)) for count in counts)
            self.last[str(what)] = (loaded, present, computed)


def conversation(tokens: int, rng: random.Random) -> ChatPrompt:
    """Held-out questions and answers in random order, with about this number of tokens (bytes), then one more question."""
    lines = (ROOT / "models" / "heldout.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "prompt" in row]
    rng.shuffle(rows)
    messages, length = list[ChatMessage](), 0
    for row in rows:
        if length + len(row["prompt"]) > tokens:
            break
        messages += [ChatMessage("user", row["prompt"]), ChatMessage("assistant", row["answer"])]
        length += len(row["prompt"]) + len(row["answer"]) + 4
    return ChatPrompt((*messages, ChatMessage("user", rows[-1]["prompt"])))


class _Reader:
    """Reads a stream on a task, up to `most` tokens; records the tokens with their arrival times."""

    def __init__(self, events: AsyncGenerator[EngineEvent, None], most: int = 400) -> None:
        self.tokens, self.times = list[int](), list[float]()
        self.enough = asyncio.Event()
        self.task = asyncio.create_task(self._read(events, most))

    async def _read(self, stream: AsyncGenerator[EngineEvent, None], most: int) -> None:
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, TokenFrame):
                    self.tokens += event.token_ids
                    self.times.append(time.perf_counter())
                    if len(self.tokens) >= BEFORE:
                        self.enough.set()
                    if len(self.tokens) >= most:
                        return


async def once(
    way: str, name: str, prompt: ChatPrompt, a: SglangEngine, b: SglangEngine, store: Path, kv_log: _Told
) -> dict[str, Any]:
    """One reply that begins at `a` and ends at `b`."""
    kv_log.last.clear()
    request = GenerationRequest(name, prompt, GREEDY)
    here = _Reader(a.generate(request))
    await here.enough.wait()
    began = time.perf_counter()
    if way == "move":
        await b.reserve(name, a.kv_layout, await a.computed_tokens(name))
    ahead_s = time.perf_counter() - began
    stopped = await a.pause(name, 0)
    if way == "recompute":
        await asyncio.to_thread(_empty, store)
    output = stopped.tokens[len(stopped.tokens) - len(here.tokens) :]
    resumed = GenerationRequest(name, prompt, GREEDY, resume_token_ids=output)
    events = b.enter(name, request, stopped.tokens) if way == "move" else b.generate(resumed)
    there = _Reader(events, BEHIND)
    await there.task
    await a.leave(name)
    await here.task
    loaded, present, computed = kv_log.last["kv taken over"]
    first_loaded, _, first_computed = kv_log.last.get("prefix read ahead", (0, 0, 0))
    moved_tokens = here.tokens + there.tokens
    unmoved = _Reader(a.generate(GenerationRequest(f"{name}-whole", prompt, GREEDY)), len(moved_tokens))
    await unmoved.task
    gaps = [after - before for before, after in zip(here.times, here.times[1:], strict=False)]
    return {
        "tokens": len(stopped.tokens),
        "stall_ms": 1000 * (there.times[0] - here.times[-1]),
        "token_gap_ms": 1000 * statistics.median(gaps),
        "ahead_ms": 1000 * ahead_s,
        "loaded": loaded + first_loaded,
        "held": present,
        "computed_ahead": first_computed,
        "computed_stalled": computed,
        "same_text": moved_tokens == unmoved.tokens[: len(moved_tokens)],
    }


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


async def measure(rounds: int) -> list[dict[str, Any]]:
    kv_log, results, rng = _Told(), list[dict[str, Any]](), random.Random(SEED)
    logger = logging.getLogger(moves_module.__name__)
    logger.setLevel(logging.INFO)
    logger.addHandler(kv_log)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        urls = await asyncio.to_thread(stack.enter_context, sglang_pair(MODEL, folder))
        engines = []
        for url in urls:
            engine = SglangEngine(SglangEngineOptions(MODEL, "large", url, start_timeout_s=120))
            await engine.start()
            stack.push_async_callback(engine.close)
            engines.append(engine)
        a, b = engines
        for i in range(-1, rounds):  # the first is to warm up
            for length in LENGTHS:
                for way in WAYS:
                    prompt = conversation(length, rng)
                    result = await once(way, f"{way}-{length}-{i}", prompt, a, b, folder / "store", kv_log)
                    if i >= 0:
                        results.append({"way": way, "prompt_about": length, "round": i, **result})
    return results


def run(rounds: int) -> None:
    """Measure, write, draw."""
    runs = asyncio.run(measure(rounds))
    kinds = ("stall_ms", "token_gap_ms", "ahead_ms", "loaded", "held", "computed_ahead", "computed_stalled", "tokens")
    cells = {
        (way, length): [r for r in runs if r["way"] == way and r["prompt_about"] == length]
        for length in LENGTHS
        for way in WAYS
    }
    medians = [
        {"way": way, "prompt_about": length, **{kind: statistics.median(r[kind] for r in cell) for kind in kinds}}
        for (way, length), cell in cells.items()
    ]
    same = sum(r["same_text"] for r in runs)
    path = report.write(
        "sglang_moves",
        {"seed": SEED, "rounds": rounds, "same_text": f"{same} of {len(runs)}", "medians": medians, "runs": runs},
    )
    series = {
        way: [median_and_range(stalls) for length in LENGTHS if (stalls := [r["stall_ms"] for r in cells[way, length]])]
        for way in WAYS
    }
    report.bars(
        "sglang_moves",
        "A reply moves between two SGLang servers: the longest pause",
        [f"{length} prompt tokens" for length in LENGTHS],
        series,
        "ms",
    )
    for median in medians:
        print(
            f"{median['prompt_about']:>5} {median['way']:<10} stall {median['stall_ms']:.0f} ms,"
            f" a token {median['token_gap_ms']:.0f} ms,"
            f" loaded {median['loaded']:.0f}, computed ahead {median['computed_ahead']:.0f},"
            f" while stalled {median['computed_stalled']:.0f}"
        )
    print(f"same text {same} of {len(runs)}; written: {path}")
