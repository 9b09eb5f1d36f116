"""The replica that length stages are planned with, from a profile or the catalogue."""

from dataclasses import dataclass
from pathlib import Path

from penstock.planner_service.files.hardware import engine_of_catalogue, gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.files.profiles import IDENTIFIED, fit_qoe, read_profile
from penstock.planner_service.simulator import EngineLimits, Replica, Workload
from penstock.planner_service.stages.profile import batches_of
from penstock.question_files.errors import FileError
from penstock.services.domain.hardware import ClusterSpec, ReplicaShape, Runtime, fit, roofline
from penstock.types.planning import EngineRuntime
from penstock.types.plans import QoeModel


@dataclass(frozen=True, slots=True)
class StageReplica:
    """What stages are planned with: a replica, its QoE model, what a sequence's move weighs; `source` in words."""

    replica: Replica
    qoe: QoeModel
    kv_bytes_per_token: float
    source: str


def read_replica(profile: Path | None, model: str, gpu: str, work: Workload) -> StageReplica:
    """From a profile file, or by a roofline from the catalogue.

    Where batches were not measured, the QoE model is fitted to those that the step times make of the trace's requests.

    Raises:
        FileError: The profile cannot be used, or the model does not fit the GPU.
        InvalidRequest: The catalogue has no such model or GPU.
    """
    if profile is not None:
        result = read_profile(profile)
        qoe = result.qoe or fit_qoe(batches_of(result.replica, work))
        source = f"{result.model} as measured on {result.machine}"
        if result.context_uncertainty is not None and result.context_uncertainty > IDENTIFIED:
            source += ", D4 not identified"
        return StageReplica(result.replica, qoe, result.kv_bytes_per_token, source)
    spec, cluster = model_of_catalogue(model), ClusterSpec(gpu_of_catalogue(gpu), 1, 1, 1.0)
    shape, runtime = ReplicaShape(1, 1), Runtime(engine=engine_of_catalogue(EngineRuntime().engine))
    room = fit(spec, shape, cluster, runtime, work.longest_tokens)
    if not room.ok:
        raise FileError(room.reason)
    replica = Replica(shape, roofline(spec, shape, cluster, runtime), room.kv_tokens, EngineLimits(max_running=1024))
    source = f"{model} on {gpu} by its data sheet"
    return StageReplica(replica, fit_qoe(batches_of(replica, work)), spec.kv_bytes_per_token, source)
