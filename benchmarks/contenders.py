"""The engines that are compared: each starts its own processes, takes workloads, and leaves nothing behind."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import yaml
from grpc import aio

from benchmarks.meshes import CONFIDENCE, mesh_of
from benchmarks.workload import Workload, drive
from penstock import AsyncClient
from penstock.local.cpu_time import descendants
from penstock.local.mesh import LocalMesh
from penstock.proto.common.v1 import common_pb2
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.proto.worker.v1 import worker_pb2_grpc
from penstock.services.domain.instances import Role
from penstock.services.processes import free_port
from tests.support import sglang

KV_TOKENS = 32_768  # every engine gets room for as many


class Contender(Protocol):
    """An engine that is up."""

    async def seconds(self, work: Workload) -> float:
        """How long a workload takes."""


def mesh_content(model: str, max_running: int, **tier: object) -> dict[str, Any]:
    """Of the mesh file of a mesh with one worker."""
    defaults = {"name": "only", "model": model, "kv_tokens": KV_TOKENS, "max_running": max_running}
    return {
        "name": "bench",
        "tiers": [defaults | tier],
        "judge": CONFIDENCE,
        "router": {"grpc_port": free_port(), "http_port": free_port()},
    }


@asynccontextmanager
async def one_tier_mesh(model: str, max_running: int, **tier: object) -> AsyncIterator[LocalMesh]:
    """A local mesh with one worker, on free ports, in a temporary folder."""
    async with mesh_of(mesh_content(model, max_running, **tier)) as mesh:
        yield mesh


def worker_address(mesh: LocalMesh) -> str:
    return mesh.view.instances(Role.WORKER)[0].address


@dataclass(frozen=True, slots=True)
class PenstockWorker:
    """A worker process of ours, called over gRPC with every token streamed. pid: the process."""

    pid: int
    stub: "worker_pb2_grpc.WorkerServiceAsyncStub"

    async def seconds(self, work: Workload) -> float:
        names = iter(range(len(work.prompts)))

        async def generate(prompt: Sequence[int], tokens: int) -> int:
            sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            prompt_message = common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=prompt))
            request = pb.GenerateRequest(request_id=f"r{next(names)}", prompt=prompt_message, sampling=sampling)
            received = 0
            async for event in self.stub.Generate(request):
                received += len(event.tokens.token_ids)
            return received

        return await drive(work, generate)


def penstock_at(tree: Path) -> Callable[[Path], AbstractAsyncContextManager[Contender]]:
    """The worker of another version of this project, which is checked out in `tree`, in this Python environment."""

    @asynccontextmanager
    async def start(model: Path) -> AsyncIterator[Contender]:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
            folder = Path(name)
            file = folder / "mesh.yaml"
            file.write_text(yaml.safe_dump(mesh_content(str(Path.cwd() / model), max_running=32)))
            env = {**os.environ, "PYTHONPATH": str(tree), "PENSTOCK_LOG_LEVEL": "warning"}

            async def run(*arguments: object) -> None:
                command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
                process = await asyncio.create_subprocess_exec(
                    *command, cwd=tree, env=env, stdout=asyncio.subprocess.DEVNULL
                )
                if await process.wait():
                    raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")

            await run("up", "--detach", "--mesh", file, "--folder", folder / "run")
            try:
                started = json.loads((folder / "run" / "run.json").read_text())
                async with AsyncClient(started["grpc"], admin=started["admin"]) as client:
                    instances = (await client.status()).instances
                (worker,) = (instance for instance in instances if instance.role == "worker")
                async with aio.insecure_channel(worker.address) as channel:
                    yield PenstockWorker(worker_of(started["pid"]), worker_pb2_grpc.WorkerServiceStub(channel))
            finally:
                await run("down", "--folder", folder / "run")

    return start


def worker_of(up_pid: int, but: Container[int] = ()) -> int:
    """The worker among the processes below one; `but`: other ones."""
    below = (p for p in descendants(up_pid) if b"worker_service" in Path(f"/proc/{p}/cmdline").read_bytes())
    (pid,) = (p for p in below if p not in but)
    return pid


@dataclass(frozen=True, slots=True)
class SglangServer:
    """A real SGLang server, called over HTTP without streaming, which is the cheapest for it."""

    session: aiohttp.ClientSession
    url: str

    async def seconds(self, work: Workload) -> float:
        async def generate(prompt: Sequence[int], tokens: int) -> int:
            params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
            body = {"input_ids": list(prompt), "sampling_params": params}
            async with self.session.post(f"{self.url}/generate", json=body) as response:
                response.raise_for_status()
                return len((await response.json())["output_ids"])

        return await drive(work, generate)


@asynccontextmanager
async def sglang_cpu(model: Path) -> AsyncIterator[Contender]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        os.environ["SGLANG_MAX_TOKENS"] = str(KV_TOKENS)
        server = sglang.sglang_server(model, free_port(), Path(folder) / "sglang.log")
        url = await asyncio.to_thread(server.__enter__)
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
                yield SglangServer(session, url)
        finally:
            server.__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class TransformersProcess:
    """transformers' continuous batching, called inside its own process: no server in between, the cheapest for it."""

    process: asyncio.subprocess.Process

    async def seconds(self, work: Workload) -> float:
        assert self.process.stdin is not None
        job = {"prompts": work.prompts, "concurrency": work.concurrency, "output_tokens": work.output_tokens}
        self.process.stdin.write((json.dumps(job) + "\n").encode())
        return float(json.loads(await self.line())["seconds"])

    async def line(self) -> str:
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        if not line:
            raise RuntimeError("transformers' process ended")
        return line


@asynccontextmanager
async def transformers_cb(model: Path) -> AsyncIterator[Contender]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.transformers_server",
        str(model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        limit=1 << 20,
    )
    try:
        contender = TransformersProcess(process)
        await contender.line()
        yield contender
    finally:
        process.kill()
        await process.wait()
