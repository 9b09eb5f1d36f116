"""Measures the steps of an SGLang server in a few seconds, for the prediction of SLOs.

A full profile (`profile.measure_server`) takes minutes. Here: prompts of two lengths, decodes of a few batch sizes, and
*mixed* steps, in which a prompt is computed while others decode. Whether that is one step (`--enable-mixed-chunk`) or two,
the time between two tokens of the decodes is measured.
"""

import asyncio
import random
import statistics
import time
from contextlib import aclosing
from itertools import pairwise

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.services.domain.latency_fit import fit_latency
from penstock.worker_service.engine.sglang.client import ServerInfo, SglangClient, server_id

BATCHES, CONTEXTS = (1, 4, 16), (16, 256)
DECODES = 12
"""Output tokens of each decode: enough gaps for a mean."""
MIXED_DECODES = 48
"""Of those next to which a prompt is computed: it must arrive while they decode."""
PROMPT_REPEATS = 3


async def measured_latency(client: SglangClient, server: ServerInfo, vocab_size: int) -> StepLatencyModel:
    """The latency model of the server's steps, which should have no other requests.

    Raises:
        InvalidRequest: The server refuses a request.
        Overloaded: The server is full.
        Unavailable: The server does not respond, or has no times of its own for prompts.
    """
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    samples: list[tuple[StepLoad, float]] = []
    longest = max(2, min(server.step_tokens, server.input_tokens) - 1)
    for length in sorted({longest, max(2, longest // 4)}):
        for repeat in range(PROMPT_REPEATS):
            seconds = await client.prompt_seconds(server_id(f"calibrate-{repeat}"), tokens(length))
            samples.append((StepLoad(length, length, 0.5 * length * (length + 1)), seconds))
    most = min(server.max_running, server.kv_tokens // (2 * (max(CONTEXTS) + MIXED_DECODES + server.page_tokens)))
    for batch in sorted({min(size, max(1, most)) for size in BATCHES}):
        for context in CONTEXTS:
            if context + DECODES < server.input_tokens:
                samples += await _steps(client, [tokens(context) for _ in range(batch)], DECODES, [])
    next_to = min(2, max(1, most - 1))
    samples += await _steps(client, [tokens(CONTEXTS[0]) for _ in range(next_to)], MIXED_DECODES, tokens(longest))
    return fit_latency([(load, seconds) for load, seconds in samples if seconds > 0])[0]


async def _steps(
    client: SglangClient, prompts: list[list[int]], decodes: int, next_to: list[int]
) -> list[tuple[StepLoad, float]]:
    """A step of these requests while all of them decode, by the tokens of the last one; `next_to`: a prompt sent meanwhile.

    With `next_to`, the one step in which it was computed: the longest gap. Otherwise the mean of all gaps: where tokens
    arrive in bursts, most gaps are nearly nothing and say nothing of a step.
    """
    begun, contexts = [asyncio.Event() for _ in prompts], [len(prompt) for prompt in prompts]
    arrived_s: list[float] = []

    async def decode(at: int) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": decodes, "ignore_eos": True}
        async with aclosing(client.generate(server_id(f"calibrate-{at}"), prompts[at], sampling)) as pieces:
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
        return [(StepLoad(len(prompts), context), statistics.fmean(gaps))] if gaps else []
    count = len(next_to)
    load = StepLoad(len(prompts) + count, context + count, 0.5 * count * (count + 1))
    return [(load, max(gaps))] if gaps else []
