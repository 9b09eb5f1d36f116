"""Meshes of real processes, one for each system, started from its plan."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu_time import scheduled_s
from benchmarks.end_to_end.explained import EngineTime
from benchmarks.end_to_end.site import Layout, mesh_content
from benchmarks.end_to_end.systems import System
from benchmarks.meshes import mesh_of
from penstock import AsyncClient
from penstock.cli.demo_run import warm_up
from penstock.cli.held_out import Question
from penstock.client.judging import AsyncJudge
from penstock.local.cpu_time import group_cpu_s
from penstock.local.mesh import LocalMesh
from penstock.services.domain.instances import Role

IDLE_S = 3.0  # over which the CPU time of an idle mesh is measured


@dataclass(frozen=True, slots=True)
class ServedSystem:
    """A system whose mesh is running. idle_cores: CPU that its processes use without requests, in cores."""

    system: System
    mesh: LocalMesh
    client: AsyncClient
    idle_cores: float

    def cpu_s(self) -> float:
        """CPU seconds that the processes of the mesh have used so far."""
        return mesh_cpu_s(self.mesh)

    @property
    def restarts(self) -> int:
        """How often processes of the mesh were restarted so far: CPU time and latency of such a run mean nothing."""
        return sum(entry.restarts for entry in self.mesh.watcher.watched.values())

    def thread_times(self) -> dict[tuple[str, int], dict[int, EngineTime]]:
        """Of the workers, by (tier, process) and thread, so far; empty where the kernel does not tell."""
        return {
            (name.removeprefix("worker-").rpartition("-")[0], entry.pid): {
                thread: EngineTime(*times) for thread, times in scheduled_s(entry.pid).items()
            }
            for name, entry in self.mesh.watcher.watched.items()
            if name.startswith("worker-") and entry.pid is not None
        }

    def engine_times_since(self, before: dict[tuple[str, int], dict[int, EngineTime]]) -> dict[str, EngineTime]:
        """By tier: of the busiest thread of each of its workers, its engine. Empty where the kernel does not tell."""
        nothing, tiers = EngineTime(0.0, 0.0), dict[str, EngineTime]()
        for worker, threads in self.thread_times().items():
            earlier = before.get(worker, {})
            spent = [
                EngineTime(
                    now.ran_s - earlier.get(thread, nothing).ran_s, now.waited_s - earlier.get(thread, nothing).waited_s
                )
                for thread, now in threads.items()
            ]
            engine = max(spent, key=lambda time: time.ran_s, default=nothing)
            sum_so_far = tiers.get(worker[0], nothing)
            tiers[worker[0]] = EngineTime(sum_so_far.ran_s + engine.ran_s, sum_so_far.waited_s + engine.waited_s)
        return {tier: time for tier, time in tiers.items() if time.ran_s > 0}

    @asynccontextmanager
    async def judge(self) -> AsyncIterator[AsyncJudge]:
        judges = self.mesh.view.instances(Role.JUDGE)
        async with AsyncJudge(judges[0].admin_address) as judge:
            yield judge


def mesh_cpu_s(mesh: LocalMesh) -> float:
    """CPU seconds that the processes of a mesh have used so far."""
    return group_cpu_s(entry.pid for entry in mesh.watcher.watched.values() if entry.pid is not None)


@asynccontextmanager
async def serving(
    system: System, layout: Layout, base: dict[str, Any], warm: list[Question], max_tokens: int | None = None
) -> AsyncIterator[ServedSystem]:
    """Run the mesh of a system, its workers warm and, if the layout says so, pinned to a core each."""
    async with mesh_of(mesh_content(base, system, layout)) as mesh, AsyncClient(mesh.addresses.grpc) as client:
        if layout.pinned:
            pin_workers(mesh)
        used = [tier.name for tier in mesh.mesh.tiers if tier.workers]
        for model in (*used, "cascade"):
            await warm_up(client, model, warm, max_tokens)
        before_s = mesh_cpu_s(mesh)
        await asyncio.sleep(IDLE_S)
        yield ServedSystem(system, mesh, client, (mesh_cpu_s(mesh) - before_s) / IDLE_S)


def pin_workers(mesh: LocalMesh) -> None:
    """Give each worker a core of its own, in turns if there are more workers than cores. Other processes are not bound."""
    cores = sorted(os.sched_getaffinity(0))
    workers = [entry.pid for name, entry in sorted(mesh.watcher.watched.items()) if name.startswith("worker-")]
    for i, pid in enumerate(pid for pid in workers if pid is not None):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[i % len(cores)]})
