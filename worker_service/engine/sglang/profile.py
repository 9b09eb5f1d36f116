"""Measures the step times of a running server from outside, over batches, contexts and prompt chunks.

The time of a decode step is the time between two tokens of a batch of streams while all of them are decoding. The time of a
prompt step is reported by the server, from start to end of its forward pass. The server must be otherwise idle.

A full profile (`measure_server`) takes minutes, the prediction of SLOs (`measured_latency`) a few seconds: prompts of two
lengths, decodes of a few batch sizes, and *mixed* steps, in which a prompt is computed while others decode. Whether that is
one step (`--enable-mixed-chunk`) or two, the time between two tokens of the decodes is measured.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from statistics import fmean, median

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.latency_fit import fit_latency
from penstock.worker_service.engine.profile import CONTEXTS, EVERY_BATCH, OnProgress, StepSample
from penstock.worker_service.engine.sglang.client import ServerInfo, SglangClient, greedy, server_id

DECODES = 16  # steps per batch; steps during which prompts are computed are excluded
REPEATS = 3  # of each prompt
FEW_BATCHES, FEW_CONTEXTS = (1, 4, 16), (16, 256)
FEW_DECODES = 12
"""Output tokens of each decode: enough gaps for a mean."""
MIXED_DECODES = 48
"""Of those next to which a prompt is computed: it must arrive while they decode."""


async def measure_server(
    client: SglangClient,
    server: ServerInfo,
    vocab_size: int,
    *,
    seed: int = 0,
    on_progress: OnProgress = lambda _, __: None,
    enough: Callable[[], bool] = lambda: False,
) -> list[StepSample]:
    """Measure every batch size and context length, and every prompt length within one step, that fits.

    enough: asked before each batch; when it is true, the remaining batches are left out, but not the prompts.

    Raises:
        Unavailable: The server does not respond.
    """
    rng = random.Random(seed)
    tokens = partial(_random, rng, vocab_size)
    batches = [
        batch
        for batch in EVERY_BATCH
        if batch.fits(server.max_running, server.input_tokens, server.kv_tokens, server.page_tokens, DECODES)
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
        samples += await measure_decodes(client, list(map(tokens, batch.prompt_tokens)))
    for done, length in enumerate(prompts, len(batches)):
        on_progress(done, len(batches) + len(prompts))
        await client.forget_prefixes()
        seconds = [await client.prompt_seconds(server_id(f"profile-{i}"), tokens(length)) for i in range(REPEATS)]
        samples.append((StepLoad(length, length, length * (length + 1) / 2), median(seconds)))
    on_progress(len(batches) + len(prompts), len(batches) + len(prompts))
    return samples


def _random(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


async def measure_decodes(client: SglangClient, prompts: Sequence[Sequence[int]]) -> list[StepSample]:
    """Measure the median decode step of one batch of prompts; no sample if no two steps had all of its requests.

    Raises:
        Unavailable: The server does not respond.
    """

    async def arrivals(i: int) -> list[float]:
        times = list[float]()
        async with aclosing(client.generate(server_id(f"profile-{i}"), prompts[i], greedy(DECODES))) as pieces:
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
    return [(load, median(gaps))]


async def measured_latency(client: SglangClient, server: ServerInfo, vocab_size: int) -> StepLatencyModel:
    """The latency model of the server's steps, which should have no other requests.

    Raises:
        InvalidRequest: The server refuses a request.
        Overloaded: The server is full.
        Unavailable: The server does not respond, or has no times of its own for prompts.
    """
    tokens, samples = partial(_random, random.Random(0), vocab_size), list[StepSample]()
    longest = max(2, min(server.step_tokens, server.input_tokens) - 1)
    for length in sorted({longest, max(2, longest // 4)}):
        for repeat in range(REPEATS):
            seconds = await client.prompt_seconds(server_id(f"calibrate-{repeat}"), tokens(length))
            samples.append((StepLoad(length, length, 0.5 * length * (length + 1)), seconds))
    most = min(server.max_running, server.kv_tokens // (2 * (max(FEW_CONTEXTS) + MIXED_DECODES + server.page_tokens)))
    for batch in sorted({min(size, max(1, most)) for size in FEW_BATCHES}):
        for context in FEW_CONTEXTS:
            if context + FEW_DECODES < server.input_tokens:
                samples += await _steps(client, [tokens(context) for _ in range(batch)], FEW_DECODES, [])
    next_to = min(2, max(1, most - 1))
    samples += await _steps(client, [tokens(FEW_CONTEXTS[0]) for _ in range(next_to)], MIXED_DECODES, tokens(longest))
    return fit_latency([(load, seconds) for load, seconds in samples if seconds > 0])[0]


async def _steps(client: SglangClient, prompts: list[list[int]], decodes: int, next_to: list[int]) -> list[StepSample]:
    """A step of these requests while all of them decode, by the tokens of the last one; `next_to`: a prompt sent meanwhile.

    With `next_to`, the one step in which it was computed: the longest gap. Otherwise the mean of all gaps: where tokens
    arrive in bursts, most gaps are nearly nothing and say nothing of a step.
    """
    begun, contexts = [asyncio.Event() for _ in prompts], [len(prompt) for prompt in prompts]
    arrived_s: list[float] = []

    async def decode(at: int) -> None:
        async with aclosing(client.generate(server_id(f"calibrate-{at}"), prompts[at], greedy(decodes))) as pieces:
            async for piece in pieces:
                begun[at].set()
                if at == len(prompts) - 1 and len(piece.token_ids) == 1 and all(event.is_set() for event in begun):
                    arrived_s.append(time.perf_counter())
        begun[at].set()

    async def prompt() -> None:
        if next_to:
            for event in begun:
                await event.wait()
            await client.prompt_seconds(server_id("calibrate-mixed"), next_to)

    await asyncio.gather(*(decode(at) for at in range(len(prompts))), prompt())
    gaps = [b - a for a, b in pairwise(arrived_s)]
    context = sum(contexts) + len(prompts) * decodes // 2
    if not next_to:
        return [(StepLoad(len(prompts), context), fmean(gaps))] if gaps else []
    count = len(next_to)
    load = StepLoad(len(prompts) + count, context + count, 0.5 * count * (count + 1))
    return [(load, max(gaps))] if gaps else []
