"""The cluster file: GPUs and the nodes that hold them."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from planner_service.files.entries import Count, Part, Positive
from planner_service.files.yaml_files import catalogue
from services.domain.hardware import Arithmetic, ClusterSpec, GpuSpec


class GpuEntry(Part):
    """A GPU's data sheet; see GpuSpec."""

    name: str = ""
    memory_gb: Positive
    memory_gb_per_s: Positive
    tflops: Positive
    link_gb_per_s: Positive
    compute_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.6
    memory_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.8
    fp8_tflops: Positive | None = None
    int8_tops: Positive | None = None
    fp4_tflops: Positive | None = None
    int4_tops: Positive | None = None

    def spec(self, name: str) -> GpuSpec:
        narrow = (
            (Arithmetic.FP8, self.fp8_tflops),
            (Arithmetic.INT8, self.int8_tops),
            (Arithmetic.FP4, self.fp4_tflops),
            (Arithmetic.INT4, self.int4_tops),
        )
        return GpuSpec(
            name,
            self.memory_gb * 1e9,
            self.memory_gb_per_s * 1e9,
            self.tflops * 1e12,
            self.link_gb_per_s * 1e9,
            self.compute_efficiency,
            self.memory_efficiency,
            tuple((arithmetic, peak * 1e12) for arithmetic, peak in narrow if peak is not None),
        )


def gpu_of_catalogue(name: str) -> GpuSpec:
    """ValueError lists what there is."""
    known = catalogue("gpus")
    if name not in known:
        raise ValueError(f"gpu: no '{name}' in the catalogue: {', '.join(sorted(known))}")
    return GpuEntry.model_validate(known[name]).spec(name)


class NodesEntry(Part):
    """Nodes with GPUs of one type."""

    gpu: str | GpuEntry
    nodes: Count
    gpus_per_node: Count
    node_link_gb_per_s: Positive = 25.0
    dollars_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None

    def spec(self, name: str = "") -> ClusterSpec:
        gpu = gpu_of_catalogue(self.gpu) if isinstance(self.gpu, str) else self.gpu.spec(self.gpu.name or "gpu")
        link_bytes_per_s = self.node_link_gb_per_s * 1e9
        return ClusterSpec(gpu, self.nodes, self.gpus_per_node, link_bytes_per_s, self.dollars_per_gpu_hour, name)


class TypeEntry(NodesEntry):
    """One of several types of GPU. name: what plans call it, else the GPU's; spot GPUs are a type with its own price."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,38}[a-z0-9])?$")] = ""

    @property
    def called(self) -> str:
        return self.name or (self.gpu if isinstance(self.gpu, str) else self.gpu.name)


class ClusterFile(Part):
    """`types`: the GPUs by type, where there are several; all of them have a price or none has one."""

    types: Annotated[list[TypeEntry], Field(min_length=1)]

    @model_validator(mode="after")
    def _sound(self) -> Self:
        names = [entry.called for entry in self.types]
        for i, entry in enumerate(self.types):
            if len(names) > 1 and not entry.called:
                raise ValueError(f"types.{i}.name: is needed for a GPU that has no name")
            if names.index(entry.called) < i:
                raise ValueError(f"types.{i}.name: '{entry.called}' is the name of types.{names.index(entry.called)}")
            if (entry.dollars_per_gpu_hour is None) != (self.types[0].dollars_per_gpu_hour is None):
                raise ValueError(f"types.{i}.dollars_per_gpu_hour: give it for all types or for none")
        return self

    def specs(self) -> tuple[ClusterSpec, ...]:
        """The GPUs by type. ValueError for a GPU that the catalogue does not have."""
        if len(self.types) == 1:
            return (self.types[0].spec(),)
        return tuple(_type_spec(entry, i) for i, entry in enumerate(self.types))


def _type_spec(entry: TypeEntry, i: int) -> ClusterSpec:
    try:
        return entry.spec(entry.called)
    except ValueError as error:
        raise ValueError(f"types.{i}.{error}") from None


def cluster_types(content: Any) -> tuple[ClusterSpec, ...]:
    """The GPUs by type of a cluster file: of one, or under `types` of several. ValueError names the field at fault."""
    if isinstance(content, dict) and "types" in content:
        return ClusterFile.model_validate(content).specs()
    return (NodesEntry.model_validate(content).spec(),)
