"""Meshes of the real models, live: how they start, what a killed worker costs, promises, drafts, tool calls and
forecasts.

`python -m benchmarks.real_models live`, on a quiet machine, for an hour. CPU seconds are those of worker processes.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import report
from benchmarks.contenders import worker_of
from benchmarks.cpu_time import cpu_s
from benchmarks.end_to_end.run import EndToEnd, Setup
from benchmarks.end_to_end.site import layouts
from benchmarks.meshes import mesh_of
from benchmarks.real_models import records
from benchmarks.real_models.prompts import MAX_TOKENS, MODELS, Task, tasks
from benchmarks.real_models.tools import NEED, NO_NEED, TOOLS
from penstock import AsyncClient, Options, Slo, Tokens
from penstock.services.stalls import StallMonitor
from penstock.types.slo import SloClass, SloResult
from tests.support.real_models import FOLDER

SMALL, LARGE, TINY = MODELS
TIMEOUT_S = 900.0
DRAFTED, DRAFTED_TOKENS = 16, 128
KILLED_AFTER, KILLED_TOKENS = 20, 120
FIRST_TOKEN_S, TOKEN_S = 20.0, 1.0
PROMISED, RATE_PER_S, PROMISED_TOKENS = 40, 0.12, 96
FORECAST_LOAD, FORECAST_ROUNDS, FORECAST_RUN_S = 0.6, 2, 660.0
FORECAST_LONE, FORECAST_RUNNING = 4, 4
FORECAST_ALIKE, FORECAST_JUDGED = 5, 2  # of so many prompts of like length, so many are judged
FORECAST_BELOW = 8.0  # points: so few prompts do not promise more
EXAMPLE = Path("examples/real-models.yaml")
SEED = 1


def tier(model: str, **settings: Any) -> dict[str, Any]:
    return {"name": model, "model": str(FOLDER / f"{model}.gguf"), **settings}


@contextlib.asynccontextmanager
async def serving(*tiers: dict[str, Any]) -> AsyncIterator[tuple[AsyncClient, float]]:
    """(a client of a mesh with these tiers, seconds that its start took)."""
    began_s = time.perf_counter()
    async with mesh_of({"name": "bench", "tiers": list(tiers)}) as mesh:
        started_s = time.perf_counter() - began_s
        async with AsyncClient(mesh.addresses.grpc[0], timeout_s=TIMEOUT_S) as client:
            yield client, started_s


async def first_answer() -> dict[str, Any]:
    """From nothing to the end of the first answer; a tier has a name, a model and a threshold."""
    began_s = time.perf_counter()
    tiers = (tier(TINY, threshold=70), tier(SMALL, threshold=70), tier(LARGE))
    async with serving(*tiers) as (client, started_s):
        reply = await client.generate("What is the capital of France?")
    seconds = time.perf_counter() - began_s
    return {"ready_s": round(started_s, 1), "answered_s": round(seconds, 1), "tier": reply.tier, "text": reply.text}


async def killed() -> dict[str, Any]:
    """The only worker of a tier is killed in the middle of a reply."""
    task, options = tasks("humaneval")[1], Options(temperature=0, max_tokens=KILLED_TOKENS)
    async with serving(tier(LARGE)) as (client, _):
        alone = await client.generate(task.text, options)
        began_s, tokens, text = time.perf_counter(), 0, ""
        async for event in client.stream(task.text, options):
            if not isinstance(event, Tokens):
                continue
            if tokens < KILLED_AFTER <= tokens + len(event.token_ids):
                os.kill(worker_of(os.getpid()), signal.SIGKILL)
            tokens, text = tokens + len(event.token_ids), text + event.text
    seconds = time.perf_counter() - began_s
    return {"same_text": text == alone.text, "alone_s": round(alone.total_s, 1), "killed_s": round(seconds, 1)}


async def promises() -> dict[str, Any]:
    """Requests with an SLO that arrive at random times, at a worker that promises."""
    rng, prompts = random.Random(SEED), tasks("humaneval")[:PROMISED]
    slo = Slo(FIRST_TOKEN_S, time_per_output_token_s=TOKEN_S)

    async def one(
        client: AsyncClient, stalls: StallMonitor, task: Task, delay_s: float
    ) -> tuple[SloResult | None, bool]:
        """(the promise and what became of it, whether the host ran all the time)."""
        await asyncio.sleep(delay_s)
        before_s = stalls.total_s()
        reply = await client.generate(task.text, temperature=0, max_tokens=PROMISED_TOKENS, slo=slo)
        return reply.slo, stalls.total_s() == before_s

    async with serving(tier(LARGE, batch_policy="slo")) as (client, started_s), StallMonitor() as stalls:
        at_s, times = 0.0, list[float]()
        for _ in prompts:
            at_s += rng.expovariate(RATE_PER_S)
            times.append(at_s)
        ended = await asyncio.gather(*(one(client, stalls, *each) for each in zip(prompts, times, strict=True)))
        suspended_s = stalls.total_s()
    admitted = [(slo, ran) for slo, ran in ended if slo is not None and slo.slo_class is SloClass.STANDARD]
    return {
        "ready_s": round(started_s, 1),
        "requests": len(ended),
        "admitted": len(admitted),
        "kept": sum(slo.attained for slo, _ in admitted),
        "host_suspended_s": round(suspended_s, 1),
        "admitted_without_suspension": sum(ran for _, ran in admitted),
        "kept_without_suspension": sum(slo.attained for slo, ran in admitted if ran),
    }


async def drafts() -> dict[str, Any]:
    """CPU seconds of the same answers with a drafter over those without, one by one and four at once. In turns for each,
    since a host's speed changes within minutes."""
    some, spent, starts = tasks("humaneval")[-DRAFTED:], dict[str, list[float]](), dict[str, float]()
    options = Options(temperature=0, max_tokens=DRAFTED_TOKENS)
    drafted = {"drafters": [str(FOLDER / f"{SMALL}.gguf")]}
    texts = dict[str, list[str]]()
    async with contextlib.AsyncExitStack() as stack:
        clients, pids = dict[str, AsyncClient](), dict[str, int]()
        for name, settings in (("alone", {}), ("drafted", {"speculation": drafted})):
            known = set(pids.values())
            clients[name], starts[name] = await stack.enter_async_context(serving(tier(LARGE, **settings)))
            pids[name] = worker_of(os.getpid(), but=known)
            await clients[name].generate(some[0].shown, options)
        salts = itertools.count()
        for at_once in (1, 4):
            for number, first in enumerate(range(0, len(some), at_once)):
                for name in list(clients)[:: 1 if number % 2 == 0 else -1]:
                    before_s, salt, client = cpu_s(pids[name]), f"{next(salts)}", clients[name]
                    calls = [client.generate(t.text, options, cache_salt=salt) for t in some[first : first + at_once]]
                    texts.setdefault(name, []).extend([reply.text for reply in await asyncio.gather(*calls)])
                    spent.setdefault(f"{name} {at_once}", []).append(round(cpu_s(pids[name]) - before_s, 2))
                print(at_once, {name: spent[f"{name} {at_once}"][-1] for name in clients}, flush=True)
    ratios = {n: round(sum(spent[f"alone {n}"]) / sum(spent[f"drafted {n}"]), 3) for n in (1, 4)}
    same = sum(a == b for a, b in zip(texts["alone"], texts["drafted"], strict=True))
    return {
        "ready_s": {name: round(each, 1) for name, each in starts.items()},
        "cpu_s": spent,
        "speed_of_alone": ratios,
        "same_texts": [same, len(texts["alone"])],
    }


async def tools() -> dict[str, Any]:
    """Calls where the model decides by itself whether to call."""
    options = Options(temperature=0, max_tokens=96, tools=TOOLS)

    async def called(client: AsyncClient, prompts: Sequence[str]) -> list[list[str]]:
        slots = asyncio.Semaphore(8)

        async def one(prompt: str) -> list[str]:
            async with slots:
                return [call.name for call in (await client.generate(prompt, options)).tool_calls]

        return await asyncio.gather(*map(one, prompts))

    async with serving(tier(LARGE)) as (client, _):
        needed = await called(client, [prompt for _, prompt in NEED])
        needless = await called(client, NO_NEED)
    wrong = {prompt: names for (name, prompt), names in zip(NEED, needed, strict=True) if names != [name]}
    called_anyway = {prompt: names for prompt, names in zip(NO_NEED, needless, strict=True) if names}
    return {
        "right": len(NEED) - len(wrong),
        "of": len(NEED),
        "needless": len(called_anyway),
        "of_none": len(NO_NEED),
        "wrong": wrong,
        "called_anyway": called_anyway,
    }


async def forecast() -> dict[str, Any]:
    """What `penstock plan` forecasts of its own plan and of the large model alone, against what both do."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        result: dict[str, Any] = {}
        await EndToEnd(_forecast_setup(Path(folder)), Path(folder)).run(result.update)
    return {key: result[key] for key in ("judged", "layouts", "cells")}


def _forecast_setup(folder: Path) -> Setup:
    """Of the shipped example and the programming tasks, both written to `folder`."""
    mesh_file, questions = folder / "mesh.yaml", folder / "questions.jsonl"
    mesh = yaml.safe_load(EXAMPLE.read_text())
    for entry in mesh["tiers"]:
        entry["model"] = str(FOLDER / entry["model"])
    mesh_file.write_text(yaml.safe_dump(mesh))
    judged, replayed = _split(tasks("humaneval"))
    questions.write_text("".join(json.dumps({"prompt": task.text}) + "\n" for task in judged + replayed))
    return Setup(
        mesh_file,
        questions,
        layouts=(replace(layouts()[1], max_running=FORECAST_RUNNING),),
        loads=(FORECAST_LOAD,),
        below_largest=(FORECAST_BELOW,),
        rounds=FORECAST_ROUNDS,
        run_s=FORECAST_RUN_S,
        measured=len(judged),
        in_order=True,
        lone=FORECAST_LONE,
        max_tokens=MAX_TOKENS["humaneval"],
        scorer="examples",
        compared=("largest", "plan"),
    )


def _split(some: list[Task]) -> tuple[list[Task], list[Task]]:
    """(prompts to judge, prompts to replay): drawn from those whose recorded answers are alike in length and, those of the
    small model, in how many of the prompt's examples they pass.

    So the figures tell of the forecast. With a sample of 64 prompts drawn from all, those that happen to be in it would move
    the median latency of a perfect forecast by 16 %, its p95 by 24 % (standard deviation over 40 draws).
    """
    small, large, rng = records.read(SMALL), records.read(LARGE), random.Random(SEED)

    def kind(task: Task) -> tuple[float, int]:
        shown, passed = small[task.id].examples
        return passed / shown if shown else 0.5, small[task.id].tokens[1] + large[task.id].tokens[1]

    ordered = sorted(some, key=kind)
    judged, replayed = list[Task](), list[Task]()
    for alike in (ordered[i : i + FORECAST_ALIKE] for i in range(0, len(ordered), FORECAST_ALIKE)):
        drawn = rng.sample(alike, len(alike))
        judged += drawn[:FORECAST_JUDGED]
        replayed += drawn[FORECAST_JUDGED:]
    return rng.sample(judged, len(judged)), rng.sample(replayed, len(replayed))


PARTS = {each.__name__: each for each in (first_answer, killed, tools, promises, drafts, forecast)}


def measure(names: Sequence[str]) -> None:
    """Measure these parts, or all; the figures of the others stay."""
    file = report.RESULTS / "real_models" / "live.json"
    known = json.loads(file.read_text())["parts"] if file.is_file() else {}
    for name in names or PARTS:
        known[name] = asyncio.run(PARTS[name]())
        print(name, known[name], flush=True)
        report.write("real_models/live", {"parts": known})
