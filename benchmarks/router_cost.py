"""CPU time of the router's process per reply and per token: two versions of this project in turns.

The same load on each: one simulated worker whose step takes 10 ms, driven over the OpenAI API by a separate process. A
version is a commit, checked out next to this tree; it runs with this tree's Python environment.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.cpu_time import cpu_s
from penstock.local.cpu_time import descendants
from penstock.services.processes import free_port

BEFORE = "9c4042d"  # the last commit before the data path was rebuilt
WHOLE: dict[str, Any] = {"replies": 1500, "connections": 32, "tokens": 32}
STREAMED: dict[str, Any] = {"replies": 600, "connections": 200, "tokens": 200}
STEP_MS = 10.0
RATIOS = ("cpu_ms_per_reply", "cpu_ms_per_1000_tokens", "worker_loop_cpu_ms_per_1000_tokens")
ROUTERS, WORKER = "penstock.router_service", "penstock.worker_service"
SLOT = "--slot"  # in the command line of one of a router's several processes


@dataclass(frozen=True, slots=True)
class Version:
    """A tree of this project. name: for the table."""

    name: str
    tree: Path


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A commit's tree in a temporary folder.

    Raises:
        RuntimeError: git does not have the commit (a shallow clone).
    """
    with tempfile.TemporaryDirectory(prefix="penstock-version-") as folder:
        tree = Path(folder) / "tree"
        added = subprocess.run(["git", "worktree", "add", "--detach", tree, commit], capture_output=True, text=True)
        if added.returncode:
            raise RuntimeError(f"git cannot check out {commit}: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], capture_output=True, check=False)


@dataclass(frozen=True, slots=True)
class RunningVersion:
    """A mesh of one version. url: of its OpenAI API. grpc, admin: its router's listeners. pid: of the parent of all its
    processes."""

    url: str
    pid: int
    grpc: str
    admin: str

    def router_cpu_s(self) -> float:
        """User and system time of the router's processes so far."""
        return sum(cpu_s(pid) for pid in self._router_pids())

    def serving_pids(self) -> list[int]:
        """The router's processes that serve requests: without the parent of several."""
        pids = self._router_pids()
        return [pid for pid in pids if SLOT in _command(pid)] or pids

    def pids(self) -> list[int]:
        """All processes of the mesh except their parent."""
        return descendants(self.pid)

    def _router_pids(self) -> list[int]:
        return sorted(pid for pid in descendants(self.pid) if ROUTERS in _command(pid))

    def worker_cpu_s(self) -> tuple[float, float]:
        """User and system time of the worker's event loop so far, and of its other threads, the engine's among them."""
        (pid,) = [pid for pid in descendants(self.pid) if WORKER in _command(pid)]
        return (loop := cpu_s(pid, pid)), cpu_s(pid) - loop


@contextmanager
def running(
    version: Version,
    processes: int = 1,
    parts: Mapping[str, Any] | None = None,
    *,
    streams: int = 256,
    step_ms: float = STEP_MS,
) -> Iterator[RunningVersion]:
    """The version's own mesh, by its own command line, on free ports.

    processes: of its router. parts: of its mesh file. streams: that its worker computes at once. step_ms: of its engine.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        pace = {"overhead_ms": step_ms, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}
        tier = {"name": "only", "model": "sim", "engine": "simulated", "simulated": pace}
        content: dict[str, Any] = {
            "name": f"cost-{free_port()}",
            "tiers": [{**tier, "max_running": streams, "max_queued": 2 * streams, "kv_tokens": 512 * streams}],
            "judge": {"scorers": [{"name": "confidence", "kind": "confidence"}], "default_scorer": "confidence"},
            "router": {"grpc_port": free_port(), "http_port": free_port(), "max_active": max(512, streams)},
        }
        content |= parts or {}
        if processes > 1:  # former versions know no such field
            content["router"] |= {"processes": processes}
        file = folder / "mesh.yaml"
        file.write_text(yaml.safe_dump(content))
        env = {**os.environ, "PYTHONPATH": str(version.tree), "PENSTOCK_LOG_LEVEL": "warning"}
        command = [sys.executable, "-m", "penstock.cli.main"]
        more = {"cwd": version.tree, "env": env, "stdout": subprocess.DEVNULL, "check": True}
        subprocess.run([*command, "up", "--detach", "--mesh", file, "--folder", folder / "run"], **more)  # type: ignore[call-overload]
        try:
            run_file = json.loads((folder / "run" / "run.json").read_text())
            admin = run_file.get("admin", run_file["grpc"])[0]  # former versions have one listener
            scheme = "https" if run_file.get("tls_folder") else "http"
            yield RunningVersion(f"{scheme}://{run_file['http'][0]}/v1", run_file["pid"], run_file["grpc"][0], admin)
        finally:
            subprocess.run([*command, "down", "--folder", folder / "run"], **more)  # type: ignore[call-overload]


def load(
    url: str,
    model: str = "only",
    *,
    replies: int,
    connections: int,
    tokens: int,
    stream: bool,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the load client to its end. more: of its options.

    Raises:
        RuntimeError: a request failed.
    """
    options = [
        "--replies",
        replies,
        "--connections",
        connections,
        "--tokens",
        tokens,
        "--model",
        model,
        *(["--stream"] if stream else []),
        *more,
    ]
    command = [sys.executable, "-m", "benchmarks.load_client", url, *map(str, options)]
    result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} of {replies} requests failed at {url}")
    return result


def measured(mesh: RunningVersion) -> dict[str, float]:
    """CPU of the router per whole reply and per 1,000 streamed tokens; of the worker's threads per 1,000 streamed tokens."""
    load(mesh.url, replies=64, connections=32, tokens=8, stream=True)  # warm
    before = mesh.router_cpu_s()
    whole = load(mesh.url, **WHOLE, stream=False)
    between, worker_before = mesh.router_cpu_s(), mesh.worker_cpu_s()
    streamed = load(mesh.url, **STREAMED, stream=True)
    after, worker_after = mesh.router_cpu_s(), mesh.worker_cpu_s()
    worker_loop_s, worker_engine_s = (
        later - earlier for later, earlier in zip(worker_after, worker_before, strict=True)
    )
    tokens = STREAMED["replies"] * STREAMED["tokens"]
    return {
        "cpu_ms_per_reply": 1000 * (between - before) / WHOLE["replies"],
        "cpu_ms_per_1000_tokens": 1e6 * (after - between) / tokens,
        "worker_loop_cpu_ms_per_1000_tokens": 1e6 * worker_loop_s / tokens,
        "worker_engine_cpu_ms_per_1000_tokens": 1e6 * worker_engine_s / tokens,
        "replies_per_s": WHOLE["replies"] / whole["seconds"],
        "tokens_per_s": tokens / streamed["seconds"],
        "first_token_p50_ms": streamed["first_token_ms"]["p50"],
    }


def measure(rounds: int, commit: str = BEFORE) -> dict[str, Any]:
    """Both versions in turns, `rounds` times. ratios: now over before, round by round."""
    rows: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    with ExitStack() as stack:
        trees = {"before": stack.enter_context(checked_out(commit)), "now": Path.cwd()}
        for number in range(rounds):
            for name, tree in trees.items():
                with running(Version(name, tree)) as mesh:
                    one = measured(mesh)
                rows[name].append(one)
                line = "  ".join(f"{key} {value:.2f}" for key, value in one.items())
                print(f"round {number + 1}  {name:<8}{line}", flush=True)
    pairs = list(zip(rows["now"], rows["before"], strict=True))
    ratios = {key: [now[key] / before[key] for now, before in pairs] for key in RATIOS}
    for key, values in ratios.items():
        print(f"{key}: now over before {statistics.median(values):.2f}", flush=True)
    return {"before_commit": commit, "whole": WHOLE, "streamed": STREAMED, "versions": rows, "ratios": ratios}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
