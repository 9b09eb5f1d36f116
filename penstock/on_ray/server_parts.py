"""Servers over several nodes: the actor of each part on another node than the worker, and how all start and end together.

Their engine's processes wait for each other. So where one is lost, the others are ended, and all start again.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import ray

from penstock.local.cpu_time import descendants
from penstock.on_ray.on_node import node_address, prepared_spec
from penstock.on_ray.shared import NAMESPACE
from penstock.placement.processes import MeshProcess
from penstock.services.background import end, supervise
from penstock.services.domain.server_nodes import ServerNode
from penstock.services.processes import ANY_STATUS, ProcessSpec, Watched, Watcher, free_port, rotate

_log = logging.getLogger(__name__)

STOP_S = 5.0  # requests have ended before
RETRY_S = 1.0

Lost = Callable[[str, str], Awaitable[None]]
"""Is told what has ended, and the last lines of its log."""


def part_name(mesh: str, process: str, rank: int) -> str:
    """Of the actor of a part. rank: from 1."""
    return f"{mesh}/{process}/{rank}"


class ServerPart:
    """Runs the part of a worker's server on its node, each time that the supervisor of the worker says so."""

    async def __init__(self, mesh: str, process: MeshProcess, rank: int) -> None:  # type: ignore[misc]  # as Ray calls it
        self._name = f"{process.name}-rank-{rank}"
        self._watcher = Watcher(final=ANY_STATUS)
        self._spec = replace(prepared_spec(mesh, process, self._name), name=self._name, stop_s=STOP_S)

    async def run(self, node: str) -> None:
        """Start the part, instead of the one that ran before. node: a ServerNode's name."""
        await self.stop()
        assert self._spec.log is not None
        rotate(self._spec.log, 0)
        await self._watcher.start(replace(self._spec, env={**self._spec.env, "PENSTOCK_WORKER_NODE": node}))

    async def ended(self) -> tuple[str, str]:
        """Wait until the part has ended; return what did, and the last lines of its log."""
        entry = self._watcher.watched[self._name]
        assert entry.task is not None
        await asyncio.wait([entry.task])  # also where it is stopped, for a worker that starts again
        return f"{self._name} ended with status {entry.status}", entry.log_tail()

    async def stop(self) -> None:
        await self._watcher.stop_all()


class ServerParts:
    """The parts of a worker's server on other nodes, seen from its supervisor. lost: told which one has ended the worker."""

    def __init__(self, mesh: str, process: MeshProcess, lost: Lost) -> None:
        self._names = [part_name(mesh, process.name, rank) for rank in range(1, process.nodes)]
        self._lost = lost
        self._watch: tuple[asyncio.Task[None], ...] = ()

    async def start(self, entry: Watched) -> ProcessSpec:
        """Start all parts, for a worker that is about to start; return how it is to be run."""
        await end(*self._watch)
        count, address = 1 + len(self._names), f"{node_address()}:{free_port()}"
        while True:
            try:
                parts = [ray.get_actor(name, namespace=NAMESPACE) for name in self._names]
                await asyncio.gather(
                    *(p.run.remote(str(ServerNode(r, count, address))) for r, p in enumerate(parts, 1))
                )
                break
            except (ValueError, ray.exceptions.RayError) as error:  # not created yet, or being moved to another node
                _log.warning("waiting for the nodes of %s: %s", entry.spec.name, error)
                await asyncio.sleep(RETRY_S)
        self._watch = (supervise("server-parts", lambda: self._end_with(parts, entry), endless=False),)
        return replace(entry.spec, env={**entry.spec.env, "PENSTOCK_WORKER_NODE": str(ServerNode(0, count, address))})

    async def stop(self) -> None:
        """Stop all parts, after the worker."""
        await end(*self._watch)
        parts = [ray.get_actor(name, namespace=NAMESPACE) for name in self._names]
        await asyncio.gather(*(part.stop.remote() for part in parts), return_exceptions=True)

    async def _end_with(self, parts: Sequence[Any], entry: Watched) -> None:
        """Kill the worker and its own part once another one has ended: the server answers no more, and would wait."""
        ends = [asyncio.ensure_future(part.ended.remote()) for part in parts]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            what, log_tail = done.pop().result()
        except ray.exceptions.RayError as error:
            what, log_tail = f"a node of the server of {entry.spec.name} is lost", str(error)
        finally:
            await end(*ends)
        await self._lost(what, log_tail)
        while (pid := entry.pid) is None:
            await asyncio.sleep(RETRY_S)
        for each in (pid, *descendants(pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
