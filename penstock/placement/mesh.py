"""A mesh whose processes a back end places: started, and kept as its plan says.

If a new plan changes the number of workers of a tier, or their shape, workers are started, and surplus ones are stopped once
the new ones are ready and their own requests have finished; `services.domain.rolling` has the order.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from penstock.placement.processes import MeshProcess, expected_instances
from penstock.placement.start import Progress
from penstock.placement.workers import Workers
from penstock.services.domain.instances import DesiredWorkers, InstanceRecord, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.rolling import Roll, next_moves, roll_steps, step_text
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.types.mesh_status import Loading
from penstock.types.plans import Plan

PROGRESS_S = 5.0  # longest time between two reports of progress

_log = logging.getLogger(__name__)


class MeshFailed(Exception):
    """The mesh could not be started. The message includes the last lines of the log that shows the reason."""


class Placer(Protocol):
    """Where processes run: a back end of `penstock up`. It keeps running what it was told to start, and decides nothing."""

    @property
    def names(self) -> Sequence[str]:
        """The processes that were started and not stopped, in the order of their start."""

    def pool_of(self, process: MeshProcess) -> str:
        """The GPUs that a worker takes its own from: a key of `rooms`."""

    async def rooms(self) -> Mapping[str, float]:
        """How many GPUs there are, by pool; a pool that is missing has enough."""

    async def start(self, process: MeshProcess) -> None:
        """Start a process and keep it running: after a crash it is started again, with a delay."""

    async def stop(self, names: Collection[str]) -> None:
        """Let processes finish their requests and end; return when they have."""

    async def died(self) -> str:
        """Wait until any process has ended by itself; return which one, and why."""

    async def absent(self, present: Collection[str]) -> str:
        """The last lines of the logs of processes that are not registered. present: the ids of those that are."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a mesh is reached. grpc, http, admin: of the routers, in the same order; processes of one router have the same.

    planner: its administrative listener; empty without one. metrics: pages by instance.
    """

    grpc: tuple[str, ...]
    http: tuple[str, ...]
    admin: tuple[str, ...]
    planner: str
    metrics: dict[str, str]

    @classmethod
    def of(cls, view: MeshView) -> "Addresses":
        routers, planners = view.instances(Role.ROUTER), view.instances(Role.PLANNER)
        return cls(
            grpc=tuple(dict.fromkeys(record.address for record in routers)),
            http=tuple(dict.fromkeys(record.http_address for record in routers)),
            admin=tuple(dict.fromkeys(record.admin_address for record in routers)),
            planner=planners[0].admin_address if planners else "",
            metrics={_service(record): record.metrics_address for record in view.instances()},
        )


class PlacedMesh:
    """What should run of a mesh, on a back end. changed: set by who updates the view."""

    def __init__(
        self, mesh: MeshFile, processes: Sequence[MeshProcess], placer: Placer, view: MeshView, router_processes: int
    ) -> None:
        """processes: what the mesh file describes. router_processes: of each router."""
        self._mesh, self._processes, self._placer, self._view = mesh, processes, placer, view
        self._expected = expected_instances(processes, router_processes)
        self._workers = Workers(mesh, placer.pool_of)
        self._asked: DesiredWorkers | None = None
        self.changed = asyncio.Event()

    def progress(self) -> Progress:
        ready: Counter[str] = Counter()
        records = self._view.instances()
        for record in records:
            ready[f"worker {record.model.tier}" if record.model is not None else record.role.value] += 1
        expected = self._expected | ({"plan": 1} if self._view.plan is None else {})
        ids, models = tuple(record.instance_id for record in records), (record.model for record in records)
        loading = {f"worker {record.tier}": str(record.loading or Loading()) for record in self._view.loading()}
        gives_logprobs: dict[str, bool | None] = {m.tier: m.gives_logprobs for m in models if m is not None}
        return Progress(dict(ready), expected, ids, loading, gives_logprobs)

    async def start(self, *, workers: bool = True) -> None:
        """Start what is missing of what the mesh file describes. workers: also of these, which follow the plan later."""
        for process in self._processes:
            if process.name not in self._placer.names and (workers or process.role != "worker"):
                await self._placer.start(process)

    async def until_ready(self, timeout_s: float, on_progress: Callable[[Progress], None]) -> None:
        """Wait until all processes are registered.

        Raises:
            MeshFailed: A process has ended by itself, or the time is over.
        """
        died = asyncio.create_task(self._placer.died())
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self.changed.clear()
                    progress = self.progress()
                    on_progress(progress)
                    if not progress.missing:
                        return
                    news = asyncio.create_task(self.changed.wait())
                    await asyncio.wait({news, died}, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
                    news.cancel()
                    if died.done():
                        raise MeshFailed(died.result())
        except TimeoutError:
            missing = ", ".join(f"{count} of {kind}" for kind, count in self.progress().missing.items())
            logs = await self._placer.absent({_service(record) for record in self._view.instances()})
            raise MeshFailed(f"not ready after {timeout_s:g} s: {missing} missing\n{logs}") from None
        finally:
            died.cancel()

    async def follow(self) -> NoReturn:
        """Start and stop workers as each new plan says, forever."""
        logged: Roll | None = None
        while True:
            self.changed.clear()
            if self._view.plan is None:  # Redis has lost it: the planner brings it back
                await self.changed.wait()
                continue
            names, workers = self._placer.names, self._workers
            target = workers.target(self._view.plan, self._desired(self._view.plan))
            roll = Roll(workers.running(names), target, await self._placer.rooms())
            if roll.running != target and (logged is None or logged.target != target):
                for number, step in enumerate(roll_steps(roll), 1):
                    _log.info("plan %d, step %d: %s", self._view.plan.revision, number, step_text(step, workers.tiers))
                logged = roll
            ready = workers.ready(self._view.instances(Role.WORKER), roll.running)
            starts, stops = next_moves(roll, ready)
            for process in workers.started(starts, names):
                await self._placer.start(process)
            if stops:
                await self._placer.stop(workers.stopped(stops, names))
            if not (starts or stops):
                await self.changed.wait()

    def _desired(self, plan: Plan) -> dict[str, int]:
        """What the leading planner asks for instead of the plan's counts; while none leads, as the last one did."""
        for record in self._view.instances(Role.PLANNER):
            if record.load is not None and record.load.leads:
                self._asked = record.load.desired
        return dict(self._asked.counts) if self._asked is not None and self._asked.revision == plan.revision else {}


def _service(record: InstanceRecord) -> str:
    """The id of an instance, or of the service of which it is one of several processes."""
    return record.group_id or record.instance_id
