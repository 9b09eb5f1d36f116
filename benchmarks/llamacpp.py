"""GGUF models: a worker of ours against llama.cpp's own server, the same file and library, one thread each.

Where `python -m tests.support.gguf_folder MODEL.gguf MODEL` has written the weights at full precision next to the file, a
worker with the torch engine is the third. All are up at once and work in turns, every second round in the opposite order, on
the same prompts of random tokens, none twice. Compared is the CPU time of each process, which work on the other core changes
less than the clock. The workers are called over gRPC with all tokens streamed, the server over HTTP without streaming, which
is the cheapest for it.
"""

import asyncio
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from grpc import aio

from benchmarks import report
from benchmarks.contenders import PenstockWorker, one_tier_mesh, worker_address, worker_of
from benchmarks.cpu_time import cpu_s
from benchmarks.public_data import DataMissing
from benchmarks.spread import median_and_quartiles
from benchmarks.workload import Workload, drive
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services.processes import free_port
from tests.support.real_models import FOLDER

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
KV_TOKENS, PARALLEL = 8192, 8
PROMPT_TOKENS, OUTPUT_TOKENS, PREFILL_TOKENS = 16, 32, 384
LEAST_TOKEN, TOKENS = 1000, 40_000
"""Of prompts: no special ones."""
SEED = 7


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """llama.cpp's server in a process of its own."""

    pid: int
    session: aiohttp.ClientSession
    url: str

    async def seconds(self, work: Workload) -> float:
        async def generate(prompt: Sequence[int], tokens: int) -> int:
            body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True}
            async with self.session.post(f"{self.url}/completion", json=body | {"cache_prompt": False}) as response:
                response.raise_for_status()
                return int((await response.json())["tokens_predicted"])

        return await drive(work, generate)


@asynccontextmanager
async def llama_server(model: Path, parallel: int = PARALLEL) -> AsyncIterator[LlamaServer]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.llamacpp_server", str(model), str(KV_TOKENS), str(parallel)),
        str(free_port()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1200)) as session:
            yield LlamaServer(process.pid, session, url)
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def penstock_worker(model: Path, but: Sequence[int] = ()) -> AsyncIterator[PenstockWorker]:
    """but: worker processes that are there already."""
    async with (
        one_tier_mesh(str(model), PARALLEL, kv_tokens=KV_TOKENS) as mesh,
        aio.insecure_channel(worker_address(mesh)) as channel,
    ):
        yield PenstockWorker(worker_of(os.getpid(), but), worker_pb2_grpc.WorkerServiceStub(channel))


def works(rng: random.Random) -> dict[str, Workload]:
    """By name, with fresh prompts."""

    def prompts(count: int, length: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rng.randrange(LEAST_TOKEN, TOKENS) for _ in range(length)) for _ in range(count))

    batches = {f"batch {n}": Workload(n, prompts(n, PROMPT_TOKENS), OUTPUT_TOKENS) for n in (1, 4, 8)}
    return {**batches, "prefill": Workload(1, prompts(1, PREFILL_TOKENS), 1)}


async def measure(model: Path, rounds: int) -> dict[str, Any]:
    rng, spent = random.Random(SEED), dict[str, dict[str, list[float]]]()
    folder = model.with_suffix("")
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(penstock_worker(model))
        contenders: dict[str, PenstockWorker | LlamaServer] = {"penstock": ours}
        contenders["llama.cpp"] = await stack.enter_async_context(llama_server(model))
        if folder.is_dir():
            contenders["torch"] = await stack.enter_async_context(penstock_worker(folder, [ours.pid]))
        for contender in contenders.values():
            await contender.seconds(works(rng)["batch 1"])  # warm
        for number in range(rounds):
            for what, work in works(rng).items():
                for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
                    pid = contenders[name].pid
                    began_s = cpu_s(pid)
                    await contenders[name].seconds(work)
                    spent.setdefault(what, {}).setdefault(name, []).append(cpu_s(pid) - began_s)
                print(f"{model.stem} round {number + 1} {what}: {spent[what]}", flush=True)
        rss = {name: _rss_mib(contender.pid) for name, contender in contenders.items()}
    tokens = {"prefill": PREFILL_TOKENS} | {f"batch {n}": n * OUTPUT_TOKENS for n in (1, 4, 8)}
    return {
        "rss_mib": rss,
        "cpu_s": spent,
        "tokens_per_cpu_s": {
            what: {name: round(tokens[what] / statistics.median(each), 1) for name, each in by.items()}
            for what, by in spent.items()
        },
        "ratio": {  # llama.cpp's time over ours, within each round
            what: {
                name: median_and_quartiles([theirs / own for theirs, own in zip(by["llama.cpp"], each, strict=True)])
                for name, each in by.items()
                if name != "llama.cpp"
            }
            for what, by in spent.items()
        },
    }


def _rss_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def run(rounds: int) -> None:
    files = [file for name in MODELS if (file := FOLDER / f"{name}.gguf").is_file()]
    if not files:
        raise DataMissing(f"no GGUF models in {FOLDER}: {', '.join(MODELS)}")
    figures = {
        file.stem: {"file_mib": round(file.stat().st_size / 2**20)} | asyncio.run(measure(file, rounds))
        for file in files
    }
    settings = {"kv_tokens": KV_TOKENS, "threads": 1, "output_tokens": OUTPUT_TOKENS, "prompt_tokens": PROMPT_TOKENS}
    path = report.write("llamacpp", {"seed": SEED, "rounds": rounds, **settings, "models": figures})
    for name, each in figures.items():
        print(f"{name}: {each['ratio']}, RSS {each['rss_mib']} MiB, file {each['file_mib']} MiB")
    print(path)
