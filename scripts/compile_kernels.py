"""Compile the numba kernels once, before tests run side by side: each process that finds none in the cache compiles its own.

`python -m scripts.compile_kernels`: the kernels land in `__pycache__` next to their sources, where every process finds them.
Kernels whose types differ from those used here are compiled at their first call, as without this.
"""

import subprocess
import sys
from collections.abc import Callable

import numpy as np


def slo_scheduler() -> None:
    """The SLO scheduler, as workers and as the fleet simulator call it."""
    from planner_service.simulator import EngineLimits, Replica, Workload
    from planner_service.simulator.judged import Promises, SloReplicas
    from services.domain import StepLatencyModel
    from services.domain.hardware import ReplicaShape
    from worker_service.scheduling.slo_policy import SloPolicy

    latency = StepLatencyModel.linear(0.001, 1e-5, 1e-9)
    SloPolicy(latency, 0.1).warm()
    work = Workload(np.arange(4.0), np.full(4, 20), np.full(4, 5))
    replicas = SloReplicas(Replica(ReplicaShape(1, 1), latency, 4096, EngineLimits(4, 64)), count=2, hops=1)
    endless = np.full(4, np.inf)
    replicas.serve(work, Promises(np.full(4, 10.0), np.full(4, 1.0), endless, np.full(4, 5)))


def simulators() -> None:
    """A tier's replicas, the cluster whose requests move, and the search for stages."""
    from planner_service.deployment.search import LatencyTable
    from planner_service.simulator import Dispatch, EngineLimits, Replica, Workload, kernel
    from planner_service.simulator.batch_step import COUNTERS, LATENCY
    from planner_service.simulator.cluster import Moves
    from planner_service.simulator.judged import BatchPolicy, PlainReplicas, Promises
    from planner_service.simulator.loop import serve_cluster
    from planner_service.simulator.policies import LeastWork
    from planner_service.stages import MoveCost, in_flight, propose
    from services.domain import StepLatencyModel
    from services.domain.hardware import ReplicaShape
    from services.domain.stages import QoeModel

    latency = StepLatencyModel.linear(0.001, 1e-5, 1e-9)
    replica = Replica(ReplicaShape(1, 1), latency, 4096, EngineLimits(4, 64))
    work = Workload(np.arange(4.0), np.full(4, 20), np.full(4, 5))
    LatencyTable(work, [replica], Dispatch.CAPACITY, 95.0).latency_s(2)
    propose(work, in_flight(work, 8), QoeModel(0.005, 1e-5, 1e-8, 0.0, 2e-7), replica, 2, 64, MoveCost(1e5, 1e12))
    serve_cluster(work, replica, 2, Moves(1e5, 1e9, 0.0), LeastWork)
    endless = np.full(4, np.inf)
    promises = Promises(np.full(4, 10.0), np.full(4, 1.0), endless, np.full(4, 5))
    PlainReplicas(replica, BatchPolicy.DECODE_FIRST).serve(work, promises)
    # a single replica, as the tests hold it against the scheduler that serves
    ones, none, each, knots = np.ones(1, np.int64), np.zeros(1, np.int64), np.zeros(1), np.array([0.0, 1.0])
    shape, limits, never = np.array([1, 1]), np.array([16, 1, 16, 0]), np.full(1, np.inf)
    tables = shape, limits, np.zeros(4), knots, knots
    outputs = each.copy(), each.copy(), np.zeros(COUNTERS)
    kernel.simulate_replica(each, ones, ones, none, ones, *tables, True, never, 1, *outputs, LATENCY)


def torch_engine() -> None:
    """The kernels of the engine and of a drafting model: all are called while the engine measures its steps at the start."""
    from pathlib import Path

    from services.clock import SystemClock
    from worker_service.engine.torch.engine import TorchEngineOptions, torch_core

    family = Path(__file__).resolve().parent.parent / "models" / "family"
    options = TorchEngineOptions(family / "medium", "medium", drafters=(family / "small",), kv_tokens=1024)
    torch_core(options, SystemClock())


PARTS: dict[str, Callable[[], None]] = {each.__name__: each for each in (slo_scheduler, simulators, torch_engine)}


def main() -> None:
    """Compile all parts side by side, or those that the command line names."""
    if named := sys.argv[1:]:
        for name in named:
            PARTS[name]()
        return
    processes = {name: subprocess.Popen([sys.executable, "-m", "scripts.compile_kernels", name]) for name in PARTS}
    failed = [name for name, process in processes.items() if process.wait() != 0]
    if failed:
        sys.exit(f"not compiled: {', '.join(failed)}")


if __name__ == "__main__":
    main()
