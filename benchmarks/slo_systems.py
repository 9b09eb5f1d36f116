"""The systems that `slo_capacity` compares, with the settings that each is tuned over."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.slo_baselines import BatchPolicy, Deployment, Disaggregated, PlainReplicas
from benchmarks.slo_scenarios import replica as replica_of
from benchmarks.speculation_simulated import DRAFT_RUNTIME, DRAFTERS
from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.simulator import Replica
from penstock.planner_service.simulator.judged import SloReplicas
from penstock.planner_service.simulator.speculation import SimulatedDrafter
from penstock.services.domain.hardware import ClusterSpec, ReplicaShape, roofline

GPUS = 3
SLO_STEP_TOKENS, SHORT_STEP_TOKENS = 4096, 512
CHUNKS = (256, 512, 1024, 2048)  # 128 was never the best of any scenario
PROMPT_STEPS = (1024, 2048, 4096)
RATIOS = ((1, 1), (2, 1), (1, 2))
NVLINK_BYTES_PER_S = 300e9
ACCEPTANCE = 0.6
"""Of drafted tokens: Leviathan and others (2023), table 3, have 0.57 (sampled) to 0.61 (greedy) for a drafter of 100M in
front of a dialog model of 137B; of OPT-125M in front of OPT-13B nothing is published."""
PROMPT_TOKENS = (1024, 2048)  # between which a drafter's time per prompt token is taken


@dataclass(frozen=True, slots=True)
class Hardware:
    """What every system of a comparison runs on. kv_bytes_per_token: of both models where there is a drafter."""

    replica: Replica
    kv_bytes_per_token: float
    drafter: SimulatedDrafter | None = None


def hardware(model: str) -> Hardware:
    return Hardware(replica_of(model), model_of_catalogue(model).kv_bytes_per_token)


def drafting_hardware(model: str) -> Hardware | None:
    """The same GPU with a drafter of the paper's in front of the model; None where the paper has none.

    The drafter's weights and KV take memory, and its prompts take time. Its steps are the planner's roofline: of so small a
    model no profile is published.
    """
    if model != "opt-13b":
        return None
    plain, spec = hardware(model), DRAFTERS[model][0]
    cluster = ClusterSpec(gpu_of_catalogue("a100-80gb"), 1, 1, 25e9)
    latency = roofline(spec, ReplicaShape(1, 1), cluster, DRAFT_RUNTIME)
    short, long = PROMPT_TOKENS
    token_s = (latency.base_s(long) - latency.base_s(short)) / (long - short)
    target = plain.replica.latency
    knots_s = tuple(y + token_s * x for x, y in zip(target.knot_tokens, target.knot_s, strict=True))
    both_bytes = plain.kv_bytes_per_token + spec.kv_bytes_per_token
    free_bytes = plain.replica.kv_tokens * plain.kv_bytes_per_token - spec.parameters * spec.bytes_per_parameter
    replica = replace(plain.replica, latency=replace(target, knot_s=knots_s), kv_tokens=int(free_bytes / both_bytes))
    return Hardware(replica, both_bytes, SimulatedDrafter(latency, ACCEPTANCE))


def with_limits(replica: Replica, max_step_tokens: int) -> Replica:
    return replace(replica, limits=replace(replica.limits, max_step_tokens=max_step_tokens))


def slo_replicas(replica: Replica, count: int = GPUS, **changes: Any) -> SloReplicas:
    return SloReplicas(with_limits(replica, SLO_STEP_TOKENS), count, **{"hops": count - 1, **changes})


def slo_settings(on: Hardware) -> dict[str, Deployment]:
    """What the SLO policy is tuned over: what becomes of requests that no replica admits, and how long steps may be."""
    short = with_limits(on.replica, SHORT_STEP_TOKENS)
    return {
        "best effort": slo_replicas(on.replica, drafter=on.drafter),
        "best effort with 5 % of each step": slo_replicas(on.replica, drafter=on.drafter, reserve=0.05),
        "declines": slo_replicas(on.replica, drafter=on.drafter, decline=True),
        f"declines, {SHORT_STEP_TOKENS} tokens per step": SloReplicas(
            short, GPUS, hops=GPUS - 1, decline=True, drafter=on.drafter
        ),
    }


def baselines(on: Hardware) -> dict[str, dict[str, Deployment]]:
    """By system, its settings by name: what each is tuned over."""
    drafter = on.drafter
    plain = [(str(chunk), with_limits(on.replica, chunk)) for chunk in CHUNKS]
    transfer_s = on.kv_bytes_per_token / NVLINK_BYTES_PER_S

    def decode_first(drop_late: bool) -> dict[str, Deployment]:
        return {
            f"chunk {name}": PlainReplicas(one, BatchPolicy.DECODE_FIRST, GPUS, drop_late, drafter)
            for name, one in plain
        }

    return {
        "prefill_first": {
            f"{tokens} tokens per step": PlainReplicas(
                with_limits(on.replica, tokens), BatchPolicy.PREFILL_FIRST, GPUS, drafter=drafter
            )
            for tokens in PROMPT_STEPS
        },
        "sarathi": decode_first(False),
        "sarathi_drop_late": decode_first(True),
        "distserve_like": {
            f"{prefill} prefill : {decode} decode": Disaggregated(
                with_limits(on.replica, SLO_STEP_TOKENS), prefill, decode, transfer_s, drafter
            )
            for prefill, decode in RATIOS
        },
    }
