"""The systems that `slo_capacity` compares, with the settings that each is tuned over."""

from dataclasses import dataclass, replace

from benchmarks.slo_baselines import BatchPolicy, Deployment, Disaggregated, PlainReplicas
from benchmarks.slo_scenarios import replica as replica_of
from penstock.planner_service.files.hardware import model_of_catalogue
from penstock.planner_service.simulator import Replica
from penstock.planner_service.simulator.judged import SloReplicas

GPUS = 3
SLO_STEP_TOKENS, SHORT_STEP_TOKENS = 4096, 512
CHUNKS = (256, 512, 1024, 2048)  # 128 was never the best of any scenario
PROMPT_STEPS = (1024, 2048, 4096)
RATIOS = ((1, 1), (2, 1), (1, 2))
NVLINK_BYTES_PER_S = 300e9


@dataclass(frozen=True, slots=True)
class Hardware:
    """What every system of a comparison runs on."""

    replica: Replica
    kv_bytes_per_token: float


def hardware(model: str) -> Hardware:
    return Hardware(replica_of(model), model_of_catalogue(model).kv_bytes_per_token)


def with_limits(replica: Replica, max_step_tokens: int) -> Replica:
    return replace(replica, limits=replace(replica.limits, max_step_tokens=max_step_tokens))


def slo_replicas(replica: Replica, count: int = GPUS, hops: int | None = None) -> SloReplicas:
    return SloReplicas(with_limits(replica, SLO_STEP_TOKENS), count, count - 1 if hops is None else hops)


def slo_settings(on: Hardware) -> dict[str, Deployment]:
    """What the SLO policy is tuned over: how long steps may be."""
    return {
        f"{tokens} tokens per step": SloReplicas(with_limits(on.replica, tokens), GPUS, hops=GPUS - 1)
        for tokens in (SLO_STEP_TOKENS, SHORT_STEP_TOKENS)
    }


def baselines(on: Hardware) -> dict[str, dict[str, Deployment]]:
    """By system, its settings by name: what each is tuned over."""
    plain = [(str(chunk), with_limits(on.replica, chunk)) for chunk in CHUNKS]
    transfer_s = on.kv_bytes_per_token / NVLINK_BYTES_PER_S

    def decode_first(drop_late: bool) -> dict[str, Deployment]:
        return {f"chunk {name}": PlainReplicas(one, BatchPolicy.DECODE_FIRST, GPUS, drop_late) for name, one in plain}

    return {
        "prefill_first": {
            f"{tokens} tokens per step": PlainReplicas(with_limits(on.replica, tokens), BatchPolicy.PREFILL_FIRST, GPUS)
            for tokens in PROMPT_STEPS
        },
        "sarathi": decode_first(False),
        "sarathi_drop_late": decode_first(True),
        "distserve_like": {
            f"{prefill} prefill : {decode} decode": Disaggregated(
                with_limits(on.replica, SLO_STEP_TOKENS), prefill, decode, transfer_s
            )
            for prefill, decode in RATIOS
        },
    }
