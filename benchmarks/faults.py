"""Cost of failures: every kind of process is killed or stopped under 300 and 1,000 streams of gRPC and SSE clients.

Real processes with simulated engines, whose text is the same on every instance: two routers, two workers per tier, two
judges, a planner, Redis. Each row starts all streams at once, causes the fault when a third of the live ones have tokens,
and reads every stream to its end. A stopped process continues after `STOPPED_S`. The row `nothing` is the same without a
fault.
"""

import asyncio
import itertools
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from benchmarks import report
from benchmarks.fault_streams import (
    StreamResult,
    grpc_stream,
    percentile_ms,
    process_of,
    signal_process,
    sse_stream,
    summary,
    until_whole,
)
from benchmarks.meshes import CONFIDENCE, mesh_of
from penstock import AsyncClient
from penstock.local.mesh import LocalMesh

TOKENS = 40  # of each reply
STEP_MS = 250.0
STOPPED_S = 15.0  # longer than a router waits for a silent worker
STREAMS = (300, 1000)
KINDS = ("nothing", "worker", "router", "judge", "planner", "redis")
FACES = ("grpc", "sse")
TIMEOUT_S = 240.0


def mesh_content() -> dict[str, Any]:
    """A cascade of two simulated tiers with room for all streams."""
    pace = {"overhead_ms": STEP_MS, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}
    room = {"max_running": 600, "max_queued": 1200, "kv_tokens": 200_000, "engine": "simulated", "simulated": pace}
    return {
        "name": "faults",
        "tiers": [
            {"name": "small", "model": "sim", "workers": 2, "threshold": 50, **room},
            {"name": "large", "model": "sim", "workers": 2, **room},
        ],
        "judge": CONFIDENCE | {"replicas": 2},
        "router": {"replicas": 2, "grpc_port": 0, "http_port": 0, "max_active": 1200, "worker_silence_s": 5},
    }


class Row:
    """One fault under load."""

    def __init__(self, mesh: LocalMesh, session: aiohttp.ClientSession, expected: dict[str, str]) -> None:
        self._mesh, self._session, self._expected = mesh, session, expected

    async def run(self, kind: str, action: str, count: int, face: str) -> dict[str, Any]:
        """Run all streams with one fault.

        Half of the streams use the cascade, whose replies are held, half the large tier, live.
        """
        mesh = self._mesh
        await until_whole(mesh)
        results = [StreamResult(f"question {i}") for i in range(count)]
        async with AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin, timeout_s=TIMEOUT_S) as client:
            running = [
                asyncio.create_task(self._stream(client, face, i)(result.prompt, result))
                for i, result in enumerate(results)
            ]
            began = time.monotonic()
            while sum(1 for r in results if r.token_times_s) < count // 6:  # a third of those that are streamed live
                if time.monotonic() - began > TIMEOUT_S:
                    break
                await asyncio.sleep(0.02)
            at = time.monotonic()
            victim = self._victim(kind)
            recovery = asyncio.create_task(self._fault(victim, action)) if victim else None
            await asyncio.gather(*running)
        took_s = time.monotonic() - began
        figures = summary(results, lambda result: self._expected[result.prompt], at)
        recovery_s = await recovery if recovery is not None else 0.0
        times = [r.token_times_s[0] - began for r in results if r.token_times_s]
        more = {
            "recovery_s": round(recovery_s, 1),
            "took_s": round(took_s, 1),
            "first_token_p99_ms": percentile_ms(times, 99),
        }
        return {"process": kind, "action": action, "face": face, "at_once": count, **figures, **more}

    def _stream(self, client: AsyncClient, face: str, index: int) -> Any:
        model = "large" if index % 2 else "cascade"
        if face == "grpc":
            return grpc_stream(client, model=model, max_tokens=TOKENS)
        urls = [f"http://{address}" for address in self._mesh.addresses.http]
        return sse_stream(self._session, urls, index // 2, {"model": model, "max_tokens": TOKENS})

    def _victim(self, kind: str) -> str:
        if kind == "nothing":
            return ""
        if kind == "router":  # the one that clients use first
            first = self._mesh.addresses.grpc[0]
            record = next(r for r in self._mesh.view.instances() if r.address == first)
            return process_of(self._mesh, record.instance_id)
        return {"worker": "worker-large-0", "judge": "judge-0", "planner": "planner-0", "redis": "redis"}[kind]

    async def _fault(self, victim: str, action: str) -> float:
        """Kill or suspend a process; return the seconds until the mesh has recovered."""
        if action == "stop":
            signal_process(self._mesh, victim, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            signal_process(self._mesh, victim, signal.SIGCONT)
        else:
            process = self._mesh.watcher.watched[victim].process
            assert process is not None
            signal_process(self._mesh, victim, signal.SIGKILL)
            await process.wait()
        return await until_whole(self._mesh)


async def undisturbed(mesh: LocalMesh, count: int) -> dict[str, str]:
    """Every prompt's text, which is the same from both tiers."""
    async with AsyncClient(mesh.addresses.grpc, admin=mesh.addresses.admin, timeout_s=TIMEOUT_S) as client:
        results = [StreamResult(f"question {i}") for i in range(count)]
        stream = grpc_stream(client, model="large", max_tokens=TOKENS)
        for at in range(0, count, 250):
            await asyncio.gather(*(stream(r.prompt, r) for r in results[at : at + 250]))
    if failed := [r.error for r in results if r.error]:
        raise RuntimeError(f"a stream failed without any fault: {failed[0]}")
    return {r.prompt: r.text for r in results}


async def measure(
    rounds: int, sizes: tuple[int, ...], kinds: tuple[str, ...], write: Callable[[list[dict[str, Any]]], object]
) -> None:
    """Call `write` with all rows so far after every round: a run that is ended keeps what it has."""
    rows: list[dict[str, Any]] = []
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        mesh_of(mesh_content(), any_ports=False) as mesh,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        await until_whole(mesh)
        row = Row(mesh, session, await undisturbed(mesh, max(sizes)))
        for number in range(rounds):
            for count, kind in itertools.product(sizes, kinds):
                for action, face in itertools.product(("kill", "stop") if kind != "nothing" else ("none",), FACES):
                    result = {"round": number + 1, **await row.run(kind, action, count, face)}
                    rows.append(result)
                    shown = (f"{key} {value}" for key, value in result.items() if key != "errors" or value)
                    print("  ".join(shown), flush=True)
            write(rows)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as the Markdown table of docs/reference/faults.md."""
    columns = ["process", "fault", "clients", "streams", "lost", "doubled", "wrong", "asked again"]
    columns += ["longest wait p50, p99", "recovered after"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for r in rows:
        waits = f"{(r['stall_p50_ms'] or 0) / 1000:.1f}, {(r['stall_p99_ms'] or 0) / 1000:.1f} s"
        recovery = f"{r['recovery_s']:.1f} s" if r["action"] != "none" else "-"
        cells = [
            r["process"],
            r["action"],
            r["face"],
            r["at_once"],
            r["lost"],
            r["doubled"],
            r["wrong"],
            r["asked_again"],
        ]
        lines.append("| " + " | ".join([*(f"{cell}" for cell in cells), waits, recovery]) + " |")
    return "\n".join(lines)


def run(rounds: int) -> None:
    _run(rounds, STREAMS, KINDS)


def run_quick(rounds: int) -> None:
    """300 streams only."""
    _run(rounds, STREAMS[:1], KINDS)


def _run(rounds: int, sizes: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    def write(rows: list[dict[str, Any]]) -> None:
        about = {"tokens_per_stream": TOKENS, "step_ms": STEP_MS, "stopped_s": STOPPED_S, "rounds": rows[-1]["round"]}
        path = report.write("faults", {**about, "rows": rows})
        print(f"{table(rows)}\n{path}", flush=True)

    asyncio.run(measure(rounds, sizes, kinds, write))
