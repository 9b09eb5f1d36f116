"""GPUs and models: memory needs and, by a roofline, step times of a model on a GPU. No I/O.

The roofline follows Williams et al. (2009): an operation takes as long as the slower of its arithmetic and its memory
traffic. Communication is that of Megatron-style tensor parallelism (two all-reduces per layer) and of pipeline stages (one
transfer per boundary). Data-parallel attention and expert parallelism are those of SGLang (docs/adr/0071).
"""

import enum
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from penstock.services.domain.latency import NO_CPU, EngineCpu, StepLatencyModel
from penstock.types.deployments import ReplicaGroup

_SIZE = "[1-9][0-9]{0,4}"
_SHAPE_NAME = re.compile(
    rf"tp(?P<tp>{_SIZE})pp(?P<pp>{_SIZE})(ep(?P<ep>{_SIZE}))?(attndp(?P<attn_dp>{_SIZE}))?(-(?P<gpu>[\w.:-]+))?"
)


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
    narrow_flops_per_s: dense, of each narrower arithmetic that its tensor cores have. host_speed: of one core of the machines
    that it is sold in, over one of those that have A100.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    narrow_flops_per_s: tuple[tuple[Arithmetic, float], ...] = ()
    host_speed: float = 1.0

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
    experts, experts_per_token: routed experts of a layer, and how many of them compute a token; 0 for a dense model, and
    where unknown. expert_parameters: of the routed experts of all layers. attention: parameters of attention; None: those of
    query, key, value and output projections with these heads.
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
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: float = 0.0
    attention: float | None = None

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter

    @property
    def attention_parameters(self) -> float:
        """What data-parallel attention holds on each GPU: the attention of all layers, without embeddings."""
        if self.attention is not None:
            return self.attention
        return 2.0 * self.layers * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def active_expert_parameters(self) -> float:
        """Of the routed experts that compute a token; 0 where these are unknown."""
        return self.expert_parameters * self.experts_per_token / self.experts if self.experts else 0.0

    def expert_coverage(self, tokens: float) -> float:
        """Expected share of a layer's E routed experts that so many tokens use: 1 - (1 - k / E)^tokens.

        Each token uses k of them, drawn uniformly and independently. Needs experts.
        """
        return 1.0 - math.pow(1.0 - self.experts_per_token / self.experts, tokens)


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """Parallelism of one replica: pp pipeline stages of tp shards each.

    gpu: the cluster's type of GPU that it runs on; empty in a cluster of one type.
    ep: groups of a stage's GPUs that routed experts are divided between whole (SGLang's --ep-size); 1: each expert is sliced.
    attn_dp: groups of a stage's GPUs that have attention and the KV of their own requests each (SGLang's --attn-dp-size); 1:
    attention is sliced over all GPUs of the stage.
    """

    tp: int
    pp: int
    gpu: str = ""
    ep: int = 1
    attn_dp: int = 1

    @classmethod
    def of(cls, group: ReplicaGroup) -> Self:
        return cls(group.tp, group.pp, group.gpu, group.ep, group.attn_dp)

    @classmethod
    def named(cls, name: str) -> Self:
        """The shape of a name.

        Raises:
            ValueError: It is none.
        """
        if (match := _SHAPE_NAME.fullmatch(name)) is None:
            raise ValueError(f"must be like tp2pp1, tp4pp2ep4attndp2 or tp1pp1-h100, not '{name}'")
        tp, pp, ep, attn_dp = (int(size or 1) for size in match.group("tp", "pp", "ep", "attn_dp"))
        return cls(tp, pp, match["gpu"] or "", ep, attn_dp)

    def times(self, count: int) -> ReplicaGroup:
        return ReplicaGroup(self.tp, self.pp, count, self.ep, self.attn_dp, self.gpu)

    @property
    def name(self) -> str:
        """The shape as part of names: `tp2pp1`, `tp4pp2ep4attndp2`, `tp1pp1-h100`."""
        name = f"tp{self.tp}pp{self.pp}" + (f"ep{self.ep}" if self.ep > 1 else "")
        name += f"attndp{self.attn_dp}" if self.attn_dp > 1 else ""
        return name + (f"-{self.gpu}" if self.gpu else "")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def attn_tp(self) -> int:
        """GPUs that attention is sliced over."""
        return self.tp // self.attn_dp

    def __str__(self) -> str:
        parts = [f"TP={self.tp}"]
        if self.pp > 1:
            parts.append(f"PP={self.pp}")
        if self.ep > 1:
            parts.append(f"EP={self.ep}")
        if self.attn_dp > 1:
            parts.append("DP attention" if self.attn_dp == self.tp else f"DP attention={self.attn_dp}")
        return ", ".join(parts) + (f" on {self.gpu}" if self.gpu else "")


def replica_words(groups: Iterable[ReplicaGroup]) -> str:
    """`2 x TP=2, PP=2; 1 x TP=4`."""
    return "; ".join(f"{group.count} x {ReplicaShape.of(group)}" for group in groups)


def replica_weight_bytes(model: ModelSpec, shape: ReplicaShape) -> float:
    """The weights on all GPUs of a replica: with data-parallel attention, each group has all attention weights."""
    return (model.parameters + (shape.attn_dp - 1) * model.attention_parameters) * model.bytes_per_parameter


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
class EngineSpec:
    """An engine by its version. cpu: what a step costs the CPU of a machine with A100.

    fast, slow: between these times what a roofline says, measured step times lie (9 of 10 in published tables).
    """

    name: str = ""
    cpu: EngineCpu = NO_CPU
    fast: float = 1.0
    slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Runtime:
    """Properties of the engine.

    step_overhead_s: of each step, what is neither a kernel's nor the `engine`'s: launches, sampling. memory_share: fraction
    of a GPU's memory that may be used. activation_bytes: memory per GPU in addition to weights and KV. tp_efficiency: K(N)
    of CASCADIA's appendix B, the fraction of the ideal 1/N speed-up that kernels reach with N shards, by N; for other N, the
    value of the next smaller one. link_latency_s: of one collective or transfer.
    """

    step_overhead_s: float = 0.002
    memory_share: float = 0.92
    activation_bytes: float = 1e9
    tp_efficiency: tuple[tuple[int, float], ...] = ((1, 1.0), (2, 0.95), (4, 0.9), (8, 0.82), (16, 0.7))
    link_latency_s: float = 12e-6
    engine: EngineSpec = EngineSpec()

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

    With data-parallel attention each group of GPUs has its own attention weights and an equal part of the KV, in which a
    request lies whole.
    drafters: models that draft for it, each whole on one GPU of the replica, with KV for as many tokens. All are on the same
    GPU, which is then the one with the least room.
    """
    if shape.tp > cluster.gpus_per_node:
        return Fit(0, f"TP={shape.tp} exceeds the {cluster.gpus_per_node} GPUs of a node")
    if shape.tp % shape.attn_dp:
        return Fit(0, f"DP attention={shape.attn_dp} does not divide TP={shape.tp}")
    if model.heads % shape.attn_tp:
        return Fit(0, f"TP={shape.attn_tp} does not divide {model.heads} heads")
    if shape.pp > model.layers:
        return Fit(0, f"PP={shape.pp} exceeds {model.layers} layers")
    if problem := expert_parallelism_problem(model, shape):
        return Fit(0, problem)
    room = cluster.gpu.memory_bytes * runtime.memory_share - runtime.activation_bytes
    held = replica_weight_bytes(model, shape)
    weights = held / shape.gpus
    gigabytes = cluster.gpu.memory_bytes / 1e9
    if weights > room:
        needed = -(-held // max(1.0, room))
        return Fit(0, f"{model.name} needs {needed:.0f} x {gigabytes:.0f} GB for its weights, has {shape.gpus}")
    drafter_weights = sum(drafter.weight_bytes for drafter in drafters)
    if weights + drafter_weights > room:
        names = ", ".join(drafter.name for drafter in drafters)
        return Fit(0, f"{names}: no room for its weights on a {gigabytes:.0f} GB GPU next to {model.name}'s at {shape}")
    copies = max(1.0, shape.attn_tp / model.kv_heads)
    token_bytes = model.kv_bytes_per_token * copies / shape.gpus + sum(d.kv_bytes_per_token for d in drafters)
    kv_tokens = int((room - weights - drafter_weights) / token_bytes)
    most = kv_tokens // shape.attn_dp
    if most < longest_tokens:
        where = f"{shape.gpus} x {gigabytes:.0f} GB"
        if shape.attn_dp > 1:
            where = f"each of {shape.attn_dp} attention groups"
        return Fit(kv_tokens, f"{model.name} on {where} has KV for {most} tokens, a request {longest_tokens}")
    return Fit(kv_tokens)


def expert_parallelism_problem(model: ModelSpec, shape: ReplicaShape) -> str:
    """Why engines cannot divide the model's experts as the shape says; empty if they can.

    SGLang's all-to-all spans all GPUs of a stage, and its kernels take weights of 16 bits or FP8 as they are stored.
    """
    if shape.ep == 1:
        return ""
    if shape.ep != shape.tp:
        return f"EP={shape.ep} must be 1 or TP={shape.tp}"
    if not model.experts:
        return f"EP={shape.ep}: {model.name} has no experts"
    if model.experts % shape.ep:
        return f"EP={shape.ep} does not divide {model.experts} experts"
    stored = {Arithmetic.BITS_16: 2.0, Arithmetic.FP8: 1.0}.get(model.arithmetic)
    if stored is None or model.bytes_per_parameter < stored:
        return f"EP={shape.ep}: needs weights of 16 bits or FP8"
    return ""


def busiest_gpu_load(choices: float, gpus: int) -> float:
    """Load of the GPU that most of so many uniform choices of experts fall on, over the mean load.

    Of m balls in n bins, the fullest has about m / n + sqrt(2 (m / n) ln n) (Raab and Steger, "Balls into Bins", 1998).
    """
    return min(float(gpus), 1.0 + math.sqrt(2.0 * gpus * math.log(gpus) / choices))


_KNOTS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)


def roofline(model: ModelSpec, shape: ReplicaShape, cluster: ClusterSpec, runtime: Runtime) -> StepLatencyModel:
    """Step time of a replica from arithmetic, memory traffic and communication.

    A step passes all pp stages in sequence; other steps may be in other stages at the same time. Products with weights take
    the model's arithmetic, at the same share of its peak as in 16 bits; what it costs to narrow activations is not counted.

    Weights are read once, of routed experts only those that tokens of the step use (`expert_coverage`); without `experts`, at
    most the active parameters of each token. What is not sliced loses nothing to slicing (`Runtime.efficiency`): attention
    with attn_dp, experts with ep. With attn_dp, each group reads all of attention's weights and the KV of its own requests,
    which are taken to be spread evenly. With ep, the busiest GPU decides (`busiest_gpu_load`).

    The engine's CPU is as fast as machines with this GPU have it.
    """
    gpu, tp, attn_tp, ep = cluster.gpu, shape.tp, shape.attn_tp, shape.ep
    sliced, attention_sliced = runtime.efficiency(tp), runtime.efficiency(attn_tp)
    weights_speed = gpu.peak_flops_per_s(model.arithmetic) * (gpu.compute_efficiency * tp * sliced)
    bandwidth = gpu.memory_bytes_per_s * gpu.memory_efficiency * tp * sliced
    # what a parameter of these costs, over one that is sliced over tp GPUs
    attention_cost, expert_cost = sliced / attention_sliced, sliced / runtime.efficiency(tp // ep)
    across_nodes = shape.gpus > cluster.gpus_per_node
    handover_bytes_per_s = cluster.node_link_bytes_per_s if across_nodes else gpu.link_bytes_per_s
    activation = model.hidden * 2.0  # bytes per token between layers

    def kernels_s(tokens: float) -> float:
        read, computed = min(model.parameters, model.active_parameters * max(1.0, tokens)), model.active_parameters
        if model.experts:
            load = busiest_gpu_load(model.experts_per_token * max(1.0, tokens), ep)
            used = min(1.0, model.expert_coverage(max(1.0, tokens)) * load)
            read = model.parameters - model.expert_parameters * (1.0 - used * expert_cost)
            computed += (load * expert_cost - 1.0) * model.active_expert_parameters
        read += (shape.attn_dp * attention_cost - 1.0) * model.attention_parameters
        computed += (attention_cost - 1.0) * model.attention_parameters
        return max(2.0 * computed * tokens / weights_speed, read * model.bytes_per_parameter / bandwidth)

    def all_reduce_s(gpus: int, tokens: float, collectives: int = 1) -> float:
        """A ring, in which each GPU sends 2 (gpus - 1) / gpus of the data. Its halves, all-gather and reduce-scatter, may be
        two collectives."""
        if gpus == 1:
            return 0.0
        sent_bytes = 2.0 * (gpus - 1) / gpus * activation * tokens
        return collectives * runtime.link_latency_s + sent_bytes / gpu.link_bytes_per_s

    def all_to_all_s(tokens: float) -> float:
        """Each GPU sends its tokens to the GPUs of their experts, in the model's arithmetic, and gets 16 bits back."""
        # expected number of other GPUs that have an expert of a token
        others = (ep - 1) * (1.0 - (1.0 - 1.0 / ep) ** model.experts_per_token)
        there_and_back = model.hidden * (2.0 if model.arithmetic is Arithmetic.BITS_16 else 1.0) + activation
        load = busiest_gpu_load(model.experts_per_token * max(1.0, tokens), ep)
        return 2.0 * runtime.link_latency_s + load * tokens / tp * others * there_and_back / gpu.link_bytes_per_s

    def base(tokens: float) -> float:
        if ep > 1:  # tokens are scattered for the all-to-all
            exchange = all_reduce_s(attn_tp, tokens / shape.attn_dp, 2) + all_to_all_s(tokens)
        else:  # after data-parallel attention, tokens are gathered for the MLP and scattered again
            exchange = all_reduce_s(attn_tp, tokens / shape.attn_dp) + all_reduce_s(tp, tokens, min(2, shape.attn_dp))
        handover = (shape.pp - 1) * (runtime.link_latency_s + activation * tokens / tp / handover_bytes_per_s)
        return runtime.step_overhead_s + kernels_s(tokens) + model.layers * exchange + handover

    copies = max(1.0, attn_tp / model.kv_heads)
    attention_speed = gpu.flops_per_s * (gpu.compute_efficiency * tp * attention_sliced)
    attention_bandwidth = gpu.memory_bytes_per_s * gpu.memory_efficiency * tp * attention_sliced
    pair_flops = 4.0 * model.layers * model.heads * model.head_dim  # scores and weighted sum, 2 operations each
    return StepLatencyModel(
        tuple(float(k) for k in _KNOTS),
        tuple(base(float(k)) for k in _KNOTS),
        context_token_s=model.kv_bytes_per_token * copies / attention_bandwidth,
        pair_s=pair_flops / attention_speed,
        cpu=runtime.engine.cpu.scaled(1.0 / gpu.host_speed),
    )
