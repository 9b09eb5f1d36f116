"""GPUs and models: memory needs and, by a roofline, step times of a model on a GPU. No I/O.

The roofline follows Williams et al. (2009): an operation takes as long as the slower of its arithmetic and its memory
traffic. Communication is that of Megatron-style tensor parallelism (two all-reduces per layer) and of pipeline stages (one
transfer per boundary).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from services.domain.latency import StepLatencyModel


class Arithmetic(enum.Enum):
    """The numbers that a model's weights and activations are multiplied in.

    Not how weights are stored: weights of 4 bits that are widened before they are multiplied (AWQ, GPTQ) compute in 16 bits.
    """

    BITS_16 = "16bit"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One type of GPU, from its data sheet.

    memory_bytes, memory_bytes_per_s, flops_per_s (dense 16 bit), link_bytes_per_s (between two GPUs of a node, one way).
    compute_efficiency, memory_efficiency: fraction of the sheet's figures that kernels reach, in all arithmetic.
    narrow_flops_per_s: dense, of each narrower arithmetic that its tensor cores have.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    narrow_flops_per_s: tuple[tuple[Arithmetic, float], ...] = ()

    def computes(self, arithmetic: Arithmetic) -> bool:
        """Whether the GPU has this arithmetic."""
        return arithmetic is Arithmetic.BITS_16 or arithmetic in dict(self.narrow_flops_per_s)

    def peak_flops_per_s(self, arithmetic: Arithmetic) -> float:
        """Of the data sheet. A GPU without this arithmetic widens to 16 bits, as engines do."""
        return dict(self.narrow_flops_per_s).get(arithmetic, self.flops_per_s)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model, from its published config.

    parameters: in memory. active_parameters: used for one token (fewer for a mixture of experts).
    kv_bytes_per_token: over all layers. bytes_per_parameter: 2 for 16 bit, 1 for FP8. heads: query heads; tensor
    parallelism must divide them. kv_heads: with more shards than these, KV is replicated. arithmetic: of the products with
    weights; attention is in 16 bits.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    active_parameters: float
    bytes_per_parameter: float
    kv_bytes_per_token: float
    arithmetic: Arithmetic = Arithmetic.BITS_16

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """Parallelism of one replica: pp pipeline stages of tp shards each.

    gpu: the cluster's type of GPU that it runs on; empty in a cluster of one type.
    """

    tp: int
    pp: int
    gpu: str = ""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        on = f" on {self.gpu}" if self.gpu else ""
        return f"TP={self.tp}" + (f", PP={self.pp}" if self.pp > 1 else "") + on


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """`nodes` nodes with `gpus_per_node` GPUs each, all of one type.

    node_link_bytes_per_s: bandwidth between nodes, one way, per GPU. dollars_per_gpu_hour: price of a GPU; None if it is
    unknown. name: of the type in a cluster of several; empty in a cluster of one.
    """

    gpu: GpuSpec
    nodes: int
    gpus_per_node: int
    node_link_bytes_per_s: float
    dollars_per_gpu_hour: float | None = None
    name: str = ""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Runtime:
    """Properties of the engine.

    step_overhead_s: CPU time per step. memory_share: fraction of a GPU's memory that may be used. activation_bytes: memory
    per GPU in addition to weights and KV. tp_efficiency: K(N) of CASCADIA's appendix B, the fraction of the ideal 1/N
    speed-up that kernels reach with N shards, by N; for other N, the value of the next smaller one. link_latency_s: of one
    collective or transfer.
    """

    step_overhead_s: float = 0.002
    memory_share: float = 0.92
    activation_bytes: float = 1e9
    tp_efficiency: tuple[tuple[int, float], ...] = ((1, 1.0), (2, 0.95), (4, 0.9), (8, 0.82), (16, 0.7))
    link_latency_s: float = 12e-6

    def efficiency(self, tp: int) -> float:
        return max((n, k) for n, k in self.tp_efficiency if n <= tp)[1]


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model fits on a replica. kv_tokens: KV capacity of the replica. reason: why it does not fit."""

    kv_tokens: int
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


def fit(
    model: ModelSpec,
    shape: ReplicaShape,
    cluster: ClusterSpec,
    runtime: Runtime,
    longest_tokens: int,
    drafters: Sequence[ModelSpec] = (),
) -> Fit:
    """Whether the weights and the KV of the longest request fit on a replica of this shape, and its KV capacity.

    drafters: models that draft for it, each whole on one GPU of the replica, with KV for as many tokens. All are on the same
    GPU, which is then the one with the least room.
    """
    if shape.tp > cluster.gpus_per_node:
        return Fit(0, f"TP={shape.tp} exceeds the {cluster.gpus_per_node} GPUs of a node")
    if model.heads % shape.tp:
        return Fit(0, f"TP={shape.tp} does not divide {model.heads} heads")
    if shape.pp > model.layers:
        return Fit(0, f"PP={shape.pp} exceeds {model.layers} layers")
    room = cluster.gpu.memory_bytes * runtime.memory_share - runtime.activation_bytes
    weights = model.weight_bytes / shape.gpus
    gigabytes = cluster.gpu.memory_bytes / 1e9
    if weights > room:
        needed = -(-model.weight_bytes // max(1.0, room))
        return Fit(0, f"{model.name} needs {needed:.0f} x {gigabytes:.0f} GB for its weights, has {shape.gpus}")
    drafter_weights = sum(drafter.weight_bytes for drafter in drafters)
    if weights + drafter_weights > room:
        names = ", ".join(drafter.name for drafter in drafters)
        return Fit(0, f"{names}: no room for its weights on a {gigabytes:.0f} GB GPU next to {model.name}'s at {shape}")
    copies = max(1.0, shape.tp / model.kv_heads)
    token_bytes = model.kv_bytes_per_token * copies / shape.gpus + sum(d.kv_bytes_per_token for d in drafters)
    kv_tokens = int((room - weights - drafter_weights) / token_bytes)
    if kv_tokens < longest_tokens:
        return Fit(
            kv_tokens,
            f"{model.name} on {shape.gpus} x {gigabytes:.0f} GB has KV for {kv_tokens} tokens, a request {longest_tokens}",
        )
    return Fit(kv_tokens)


_KNOTS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)


def roofline(model: ModelSpec, shape: ReplicaShape, cluster: ClusterSpec, runtime: Runtime) -> StepLatencyModel:
    """Step time of a replica from arithmetic, memory traffic and communication.

    A step passes all pp stages in sequence; other steps may be in other stages at the same time. Products with weights take
    the model's arithmetic, at the same share of its peak as in 16 bits; what it costs to narrow activations is not counted.
    """
    gpu, tp = cluster.gpu, shape.tp
    reached = gpu.compute_efficiency * tp * runtime.efficiency(tp)  # of one GPU's peak, by all shards of one stage
    speed = gpu.flops_per_s * reached
    weights_speed = gpu.peak_flops_per_s(model.arithmetic) * reached
    bandwidth = gpu.memory_bytes_per_s * gpu.memory_efficiency * tp * runtime.efficiency(tp)
    across_nodes = shape.gpus > cluster.gpus_per_node
    handover_bytes_per_s = cluster.node_link_bytes_per_s if across_nodes else gpu.link_bytes_per_s
    activation = model.hidden * 2.0  # bytes per token between layers

    def base(tokens: float) -> float:
        read = min(model.parameters, model.active_parameters * max(1.0, tokens)) * model.bytes_per_parameter
        kernels = max(2.0 * model.active_parameters * tokens / weights_speed, read / bandwidth)
        reduce = 0.0
        if tp > 1:  # ring all-reduce: each GPU sends 2 (tp - 1) / tp of the data
            sent_bytes = 2.0 * (tp - 1) / tp * activation * tokens
            reduce = 2.0 * model.layers * (runtime.link_latency_s + sent_bytes / gpu.link_bytes_per_s)
        handover = (shape.pp - 1) * (runtime.link_latency_s + activation * tokens / tp / handover_bytes_per_s)
        return runtime.step_overhead_s + kernels + reduce + handover

    copies = max(1.0, tp / model.kv_heads)
    pair_flops = 4.0 * model.layers * model.heads * model.head_dim  # scores and weighted sum, 2 operations each
    return StepLatencyModel(
        tuple(float(k) for k in _KNOTS),
        tuple(base(float(k)) for k in _KNOTS),
        context_token_s=model.kv_bytes_per_token * copies / bandwidth,
        pair_s=pair_flops / speed,
    )
