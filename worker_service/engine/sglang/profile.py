"""Measures the step times of a running server from outside, over batches, contexts and prompt chunks.

The time of a decode step is the time between two tokens of a batch of streams while all of them are decoding. The time of a
prompt step is reported by the server, from start to end of its forward pass. The server must be otherwise idle.
"""

import asyncio
import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing
from itertools import pairwise
from statistics import median

from penstock.services.domain.latency import StepLoad
from penstock.worker_service.engine.profile import CONTEXTS, EVERY_BATCH, MAX_PROMPT_TOKENS, StepSample
from penstock.worker_service.engine.sglang.client import ServerInfo, SglangClient, server_id

DECODES = 16  # steps per batch; steps during which prompts are computed are excluded
REPEATS = 3  # of each prompt


async def measure_server(
    client: SglangClient,
    server: ServerInfo,
    vocab_size: int,
    *,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda _, __: None,
    enough: Callable[[], bool] = lambda: False,
) -> list[StepSample]:
    """Measure every batch size and context length, and every prompt length within one step, that fits.

    enough: asked before each batch; when it is true, the remaining batches are left out, but not the prompts.

    Raises:
        Unavailable: The server does not respond.
    """
    rng = random.Random(seed)
    batches = [
        batch
        for batch in EVERY_BATCH
        if batch.count <= server.max_running
        and batch.context_tokens + DECODES + 2 <= server.input_tokens
        and batch.count * (batch.context_tokens + DECODES + server.page_tokens)
        <= min(server.kv_tokens, max(MAX_PROMPT_TOKENS, batch.context_tokens + 32))
    ]
    rng.shuffle(batches)  # so that those measured until it is enough cover all lengths
    longest = min(server.step_tokens, server.input_tokens)
    prompts = sorted({*(length for length in (4, *CONTEXTS) if length < longest), longest - longest // 4, longest})
    samples = list[StepSample]()
    for done, batch in enumerate(batches):
        if enough():
            break
        on_progress(done, len(batches) + len(prompts))
        await client.forget_prefixes()
        samples += await measure_decodes(client, [_random(rng, vocab_size, count) for count in batch.prompt_tokens])
    for done, length in enumerate(prompts, len(batches)):
        on_progress(done, len(batches) + len(prompts))
        await client.forget_prefixes()
        seconds = [
            await client.prompt_seconds(server_id(f"profile-{i}"), _random(rng, vocab_size, length))
            for i in range(REPEATS)
        ]
        samples.append(StepSample(StepLoad(length, length, length * (length + 1) / 2), median(seconds)))
    on_progress(len(batches) + len(prompts), len(batches) + len(prompts))
    return samples


def _random(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


async def measure_decodes(client: SglangClient, prompts: Seq[Seq[int]]) -> list[StepSample]:
    """Measure the median decode step of one batch of prompts; no sample if no two steps had all of its requests.

    Raises:
        Unavailable: The server does not respond.
    """
    sampling = {"temperature": 0.0, "max_new_tokens": DECODES, "ignore_eos": True}

    async def arrivals(i: int) -> list[float]:
        times = list[float]()
        async with aclosing(client.generate(server_id(f"profile-{i}"), prompts[i], sampling)) as pieces:
            async for piece in pieces:
                times += [time.perf_counter()] * len(piece.token_ids)
        return times

    streams = await asyncio.gather(*(arrivals(i) for i in range(len(prompts))))
    began, ended = max(times[0] for times in streams), min(times[-1] for times in streams)
    gaps = [b - a for times in streams for a, b in pairwise(times) if a >= began and b <= ended and b > a]
    if not gaps:
        return []
    ends = [len(prompt) + DECODES // 2 for prompt in prompts]  # halfway
    load = StepLoad(len(prompts), sum(ends), 0.0, max(ends) * len(ends) - sum(ends))
    return [StepSample(load, median(gaps))]
