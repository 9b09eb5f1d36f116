"""Two endpoints of OpenAI's API as the only tiers, with all defaults: what the cascade saves, loses and costs to judge.

Two real models in llama.cpp's own servers, one thread each, and the mesh of a file that names them and a threshold.
Prompts with known answers (two of three HumanEval, the others GSM8K) are sent one by one, to the cascade and to the large
tier alone, by tens in two passes, so that no prompt is in a server's cache and both find the machine alike. For hours on two
cores: what is answered is kept in `results/endpoints.jsonl`, a line each without texts, and not asked again. The servers' and
the judge's CPU seconds are counted for each request.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from benchmarks import report
from benchmarks.llamacpp import llama_server
from benchmarks.public_data import DataMissing
from benchmarks.real_models.prompts import MAX_TOKENS, Task, tasks
from benchmarks.real_models.records import RUN_S, is_right
from penstock import AsyncClient, Options
from penstock.judge_service.scorers.code.sandbox.bubblewrap import Sandbox
from penstock.local.cpu_time import group_cpu_s
from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions
from penstock.types.replies import FinishReason
from tests.support.real_models import FOLDER

MODELS = {"small": "qwen2.5-coder-0.5b", "large": "qwen2.5-coder-1.5b"}
ANSWERS = Path(__file__).with_name("results") / "endpoints.jsonl"
PROMPTS, PASS, THRESHOLD, QUICK = 100, 10, 70.0, 3
RESAMPLES, TIMEOUT_S = 2000, 3600.0
WARM_UP = "Write a Python function f that doubles a number, so that f(2) == 4, in one block of code."
"""Not counted: the judge imports what runs programs when it first does."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt asked of `model`. tier: whose answer was delivered. score: of the first tier's; None if it was not judged.
    cpu_s: of the servers by tier, and of the judge."""

    id: str
    model: str
    tier: str
    score: float | None
    right: bool
    tokens: int
    cpu_s: dict[str, float]


def prompts() -> Iterator[Task]:
    code, numbers = iter(tasks("humaneval")), iter(tasks("gsm8k"))
    for i in range(PROMPTS):
        yield next(numbers if i % 3 == 2 else code)


def answered() -> dict[tuple[str, str], Answered]:
    """What has been answered so far, by model and prompt."""
    lines = ANSWERS.read_text().splitlines() if ANSWERS.is_file() else []
    rows = [Answered(**json.loads(line)) for line in lines]
    return {(row.model, row.id): row for row in rows}


async def ask(count: int) -> None:
    """Ask what has not been asked yet, of the first `count` prompts."""
    known, sandbox = answered(), Sandbox(RUN_S)
    every = [*prompts()][:count]
    passes = [every[at : at + PASS] for at in range(0, len(every), PASS)]
    left = [(m, task) for one in passes for m in ("cascade", "large") for task in one if (m, task.id) not in known]
    if not left:
        return
    await sandbox.start()
    async with AsyncExitStack() as stack:
        servers = {
            tier: await stack.enter_async_context(llama_server(FOLDER / f"{model}.gguf", parallel=1))
            for tier, model in MODELS.items()
        }
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="penstock-bench-")))
        tiers: list[dict[str, Any]] = [
            {"name": tier, "engine": "openai", "model": MODELS[tier], "openai": {"endpoints": [f"{server.url}/v1"]}}
            for tier, server in servers.items()
        ]
        tiers[0]["threshold"] = THRESHOLD
        file = folder / "mesh.yaml"
        file.write_text(yaml.safe_dump({"tiers": tiers}))
        mesh = await stack.enter_async_context(LocalMesh(MeshOptions(file, folder, any_ports=True)))
        pids = {tier: [server.pid] for tier, server in servers.items()}
        pids["judge"] = [w.pid for name, w in mesh.watcher.watched.items() if name.startswith("judge") and w.pid]
        client = await stack.enter_async_context(AsyncClient(mesh.addresses.grpc[0], timeout_s=TIMEOUT_S))
        await client.generate(WARM_UP, Options(temperature=0, max_tokens=64))
        for model, task in left:
            before = {name: group_cpu_s(own) for name, own in pids.items()}
            options = Options(model=model, temperature=0, max_tokens=MAX_TOKENS[task.set])
            reply = await client.generate(task.text, options)
            row = Answered(
                task.id,
                model,
                reply.tier,
                reply.tiers[0].score,
                reply.finish_reason is FinishReason.STOP and await is_right(task, reply.text, sandbox),
                reply.usage.output_tokens,
                {name: round(group_cpu_s(own) - before[name], 2) for name, own in pids.items()},
            )
            with ANSWERS.open("a") as lines:
                lines.write(json.dumps(asdict(row)) + "\n")
            print(f"{model} {task.id}: {row}", flush=True)


def figures(rows: dict[tuple[str, str], Answered]) -> dict[str, Any]:
    """Of the prompts that both have answered."""
    names = [name for model, name in rows if model == "cascade" and ("large", name) in rows]
    cascade, alone = ([rows[model, name] for name in names] for model in ("cascade", "large"))

    def cpu_s(of: list[Answered], *parts: str) -> float:
        return round(sum(row.cpu_s[part] for row in of for part in parts), 1)

    gains = 100.0 * np.array([float(a.right) - float(b.right) for a, b in zip(cascade, alone, strict=True)])
    drawn = np.random.default_rng(1).choice(gains, (RESAMPLES, len(gains))).mean(axis=1)
    alone_cpu_s, judge_cpu_s = cpu_s(alone, "large"), cpu_s(cascade, "judge")
    return {
        "prompts": len(names),
        "accepted_at_first": round(sum(row.tier == "small" for row in cascade) / len(names), 3),
        "right": {"cascade": sum(row.right for row in cascade), "large": sum(row.right for row in alone)},
        "gained_points": [round(float(x), 1) for x in (gains.mean(), *np.percentile(drawn, (2.5, 97.5)))],
        "cpu_s": {
            "cascade": cpu_s(cascade, "small", "large", "judge"),
            "small": cpu_s(cascade, "small"),
            "judge": judge_cpu_s,
            "large": alone_cpu_s,
        },
        "judging_share_of_large": round(judge_cpu_s / alone_cpu_s, 4),
        "cascade_share_of_large": round(cpu_s(cascade, "small", "large", "judge") / alone_cpu_s, 3),
    }


def run(_: int, count: int = PROMPTS) -> None:
    if missing := [model for model in MODELS.values() if not (FOLDER / f"{model}.gguf").is_file()]:
        raise DataMissing(f"no GGUF models in {FOLDER}: {', '.join(missing)}")
    asyncio.run(ask(count))
    result = figures(answered())
    print(result)
    if result["prompts"] >= PROMPTS:
        print(report.write("endpoints", {"models": MODELS, "threshold": THRESHOLD, **result}))


def run_quick(rounds: int) -> None:
    """The first prompts only; their answers count for the whole run, too."""
    run(rounds, QUICK)
