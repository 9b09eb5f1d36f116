"""Compile the numba kernels once, before tests run side by side: each process that finds none in the cache compiles its own.

`python scripts/compile_kernels.py`: `penstock.services.compilation` says where they are kept. Kernels whose types differ from
those used here are compiled at their first call, as without this. Parts whose packages are not installed are left out.
"""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec


def slo_scheduler() -> None:
    """The SLO scheduler, as workers and as the fleet simulator call it."""
    import numpy as np

    from penstock.planner_service.simulator import EngineLimits, Replica, Workload
    from penstock.planner_service.simulator.judged import Promises, SloReplicas
    from penstock.services.domain.hardware import ReplicaShape
    from penstock.services.domain.latency import StepLatencyModel
    from penstock.worker_service.scheduling.slo_policy import SloPolicy

    latency = StepLatencyModel.linear(0.001, 1e-5, 1e-9)
    SloPolicy(latency, 0.1).warm()
    work = Workload(np.arange(4.0), np.full(4, 20), np.full(4, 5))
    replicas = SloReplicas(Replica(ReplicaShape(1, 1), latency, 4096, EngineLimits(4, 64)), count=2, hops=1)
    endless = np.full(4, np.inf)
    replicas.serve(work, Promises(np.full(4, 10.0), np.full(4, 1.0), endless, np.full(4, 5)))


def simulators() -> None:
    """A tier's replicas, the cluster whose requests move, and the search for stages."""
    import numpy as np

    from penstock.planner_service.deployment.search import LatencyTable
    from penstock.planner_service.simulator import Dispatch, EngineLimits, Replica, Workload, kernel
    from penstock.planner_service.simulator.batch_step import COUNTERS, LATENCY, Lateness, Outcome
    from penstock.planner_service.simulator.cluster import Cluster, Moves
    from penstock.planner_service.simulator.loop import serve_on
    from penstock.planner_service.simulator.policies import LeastWork
    from penstock.planner_service.stages.proposals import propose
    from penstock.planner_service.stages.sample import in_flight
    from penstock.services.domain.hardware import ReplicaShape
    from penstock.services.domain.latency import StepLatencyModel
    from penstock.types.plans import QoeModel

    latency = StepLatencyModel.linear(0.001, 1e-5, 1e-9)
    replica = Replica(ReplicaShape(1, 1), latency, 4096, EngineLimits(4, 64))
    work = Workload(np.arange(4.0), np.full(4, 20), np.full(4, 5))
    LatencyTable(work, [replica], Dispatch.CAPACITY, 95.0).latency_s(2)
    propose(work, in_flight(work, 8), QoeModel(0.005, 1e-5, 1e-8, 0.0, 2e-7), replica, 2, 64, Moves(1e5, 1e12))
    serve_on(Cluster(work, [replica] * 2, Moves(1e5, 1e9)), LeastWork)
    endless = np.full(4, np.inf)
    # a single replica, as the tests hold it against the scheduler that serves
    outcome = Outcome(np.zeros(4), np.zeros(4), np.zeros(COUNTERS))
    kernel.simulate_replica(work.arrivals, replica.engine(), True, Lateness(endless, 4, LATENCY), outcome)


def torch_engine() -> None:
    """The kernels of the engine and of a drafting model: all are called while the engine measures its steps at the start."""
    from pathlib import Path

    from penstock.services.clock import SystemClock
    from penstock.worker_service.engine.torch.engine import TorchEngineOptions, torch_core

    family = Path(__file__).resolve().parent.parent / "models" / "family"
    options = TorchEngineOptions(family / "medium", "medium", drafters=(family / "small",), kv_tokens=1024)
    torch_core(options, SystemClock())


NEEDS: dict[Callable[[], None], tuple[str, ...]] = {
    slo_scheduler: ("numba",),
    simulators: ("numba", "scipy"),
    torch_engine: ("numba", "torch"),
}
PARTS = {part.__name__: part for part, packages in NEEDS.items() if all(map(find_spec, packages))}


def main() -> None:
    """Compile all parts side by side, or those that the command line names."""
    if named := sys.argv[1:]:
        for name in named:
            PARTS[name]()
        return
    processes = {name: subprocess.Popen([sys.executable, __file__, name]) for name in PARTS}
    failed = [name for name, process in processes.items() if process.wait() != 0]
    if failed:
        sys.exit(f"not compiled: {', '.join(failed)}")


if __name__ == "__main__":
    main()
