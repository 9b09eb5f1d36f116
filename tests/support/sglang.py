"""Starts a real SGLang server for tests and benchmarks; see sglang_cpu/README.md."""

import asyncio
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from penstock.services.processes import free_port
from penstock.worker_service.engine.sglang.client import SglangClient
from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.engine.sglang.launch import ServerShape, command, environment
from penstock.worker_service.engine.sglang.server_link import SglangEngineOptions

FOLDER = Path(__file__).with_name("sglang_cpu")
VENV = Path(os.environ.get("SGLANG_VENV", Path.home() / ".cache" / "penstock-sglang"))
START_TIMEOUT_S = 300.0

# Flags of servers that share what they have computed, through files.
SHARED_STORE = (
    *("--page-size", "16", "--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through"),
    *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
    "--enable-cache-report",
)
# What a server that a worker starts needs on a CPU, over what any server needs: settings of `tiers[].sglang`.
CPU_LAUNCH: dict[str, Any] = {
    "python": str(VENV / "bin" / "python"),
    "flags": ("--attention-backend", "torch_native"),
    "env": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(FOLDER / "stub")},
    "start_timeout_s": START_TIMEOUT_S,
}


def installed() -> bool:
    """Whether install.sh has been run here."""
    return (VENV / "bin" / "python").exists() and any(VENV.glob("lib/python*/site-packages/sglang"))


@contextmanager
def sglang_server(model: Path, port: int, log: Path, *flags: str) -> Iterator[str]:
    """A running server with SGLang's own defaults, the cache's room aside; yields its base URL."""
    argv = [str(FOLDER / "launch.sh"), str(model), str(port), *flags]
    with running(argv, {"SGLANG_VENV": str(VENV)}, port, log) as url:
        yield url


@contextmanager
def sglang_pair(model: Path, folder: Path, *flags: str) -> Iterator[list[str]]:
    """Two servers that share the store `folder`/store, started at once; yields their base URLs."""
    store = folder / "store"
    store.mkdir()
    env = {"SGLANG_VENV": str(VENV), "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}

    def server(name: str) -> AbstractContextManager[str]:
        port = free_port()
        argv = [str(FOLDER / "launch.sh"), str(model), str(port), *SHARED_STORE, *flags]
        return running(argv, env, port, folder / f"{name}.log")

    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            urls = list(pool.map(stack.enter_context, [server("a"), server("b")]))
        yield urls


@contextmanager
def launched_server(shape: ServerShape, log: Path) -> Iterator[str]:
    """A running server as a worker would start it; yields its base URL."""
    port = free_port()
    with running(command(shape, port), environment(shape), port, log) as url:
        yield url


def cpu_shape(model: Path, **options: Any) -> ServerShape:
    """A server for this machine's CPU."""
    how = {name: CPU_LAUNCH[name] for name in ("python", "env")}
    # it takes requests in before it is sure of room for their replies, so that room runs out in tests too
    flags = (*CPU_LAUNCH["flags"], "--schedule-conservativeness", "0.05")
    return ServerShape(**{"model": str(model), "name": model.name, "kv_tokens": 4096, "flags": flags, **how, **options})


class SglangServers:
    """Servers that tests share, one for each shape, started when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._running = folder, dict[str, tuple[str, ExitStack]]()

    async def url(self, shape: ServerShape) -> str:
        """A server of this shape, its prefix cache empty."""
        key = repr(shape)
        if key not in self._running:
            stack, log = ExitStack(), self._folder / f"server-{len(self._running)}.log"
            self._running[key] = await asyncio.to_thread(stack.enter_context, launched_server(shape, log)), stack
        url, _ = self._running[key]
        client = SglangClient(url)
        await client.forget_prefixes()
        await client.close()
        return url

    def kill(self, shape: ServerShape) -> None:
        """End the server of this shape as `kill -9` does."""
        _, stack = self._running.pop(repr(shape))
        stack.close()

    async def engine(
        self, model: Path, *, max_context_tokens: int | None = None, max_queued: int = 64, **options: Any
    ) -> SglangEngine:
        """An engine, not started, over a server of the shape that `options` ask for. The rest is the engine's affair."""
        shape = cpu_shape(model, **options)
        url = await self.url(shape)
        return SglangEngine(
            SglangEngineOptions(
                model,
                model.name,
                url,
                max_requests=shape.max_running + max_queued,
                max_context_tokens=max_context_tokens,
            )
        )

    def close(self) -> None:
        for _, stack in self._running.values():
            stack.close()


@contextmanager
def running(argv: list[str], env: Mapping[str, str], port: int, log: Path) -> Iterator[str]:
    """A process, with its children, until the block ends; yields its base URL once it is healthy."""
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, env={**os.environ, **env}, start_new_session=True)
    try:
        until = time.monotonic() + START_TIMEOUT_S
        url = f"http://127.0.0.1:{port}"
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"SGLang did not start:\n{log.read_text()[-6000:]}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the server and its own processes
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
