"""The effect of the flags that workers set for SGLang servers: each is removed, side by side in one run.

The shipped large model on a CPU, servers are called directly and in turns, with new prompts each time. A server without
tokenizer returns tokens only, which is sufficient for a worker.
"""

import asyncio
import itertools
import random
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import report
from benchmarks.sglang_overhead import (
    AT_ONCE,
    FIRST_TOKENS,
    FIRSTS,
    Way,
    directly,
    prompt_of,
    server_without,
    spread_of_differences,
    spread_of_ratios,
    throughput,
)

LESS = {
    "as workers do": (),
    "with a tokenizer": ("--skip-tokenizer-init",),
    "with overlapped steps": ("--disable-overlap-schedule",),
}
OURS, *OTHERS = LESS


async def measure(rounds: int) -> dict[str, Any]:
    rng = random.Random(10)
    rates, crowded, alone = ({name: list[float]() for name in LESS} for _ in range(3))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        ways: dict[str, Way] = {}
        for name, switches in LESS.items():
            url = stack.enter_context(server_without(switches, folder / f"{len(ways)}.log"))
            ways[name] = directly(session, url)
            await throughput(ways[name], rng)  # warm
        orders = list(itertools.permutations(ways.items()))
        for number in range(rounds):
            for name, way in orders[number % len(orders)]:
                rate, first_ms = await throughput(way, rng)
                rates[name].append(rate)
                crowded[name].append(first_ms)
            for i in range(FIRSTS):
                for name, way in orders[i % len(orders)]:
                    seconds, _ = await way(prompt_of(rng), f"{number}-{i}-{rng.random()}", FIRST_TOKENS)
                    alone[name].append(1000 * seconds)
            print(f"round {number + 1}  { ({name: round(of[-1]) for name, of in rates.items()}) } tokens/s", flush=True)
    return {
        "model": "large",
        "at_once": AT_ONCE,
        "rounds": rounds,
        "seed": 10,
        "tokens_per_s": rates,
        "first_token_ms": {"at 32, p50": crowded, "alone": alone},
        "ours_over": {name: spread_of_ratios(rates[OURS], rates[name]) for name in OTHERS},
        "ms_added_by_ours": {
            "at 32, p50": {name: spread_of_differences(crowded[OURS], crowded[name]) for name in OTHERS},
            "alone": {name: spread_of_differences(alone[OURS], alone[name]) for name in OTHERS},
        },
    }


def run(rounds: int) -> None:
    figures = asyncio.run(measure(rounds))
    print(report.write("sglang_flags", figures))
    print(figures["ours_over"], figures["ms_added_by_ours"])
