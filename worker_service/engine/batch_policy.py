"""The policy by which an engine plans its steps."""

from penstock.services.domain.latency import StepLatencyModel
from penstock.worker_service.scheduling.policies import DecodeFirst, PolicyName, PrefillFirst
from penstock.worker_service.scheduling.steps import BatchPolicy


def batch_policy(name: PolicyName, latency: StepLatencyModel, best_effort_reserve: float) -> BatchPolicy:
    """The policy of this name, ready for its first step: compiled code is compiled, or read from its cache, now."""
    if name is PolicyName.DECODE_FIRST:
        return DecodeFirst()
    if name is PolicyName.PREFILL_FIRST:
        return PrefillFirst()
    from penstock.worker_service.scheduling.slo_policy import SloPolicy  # numba takes a second to import

    policy = SloPolicy(latency, best_effort_reserve)
    policy.warm()
    return policy
