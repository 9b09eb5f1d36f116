"""The policy by which an engine plans its steps."""

from collections.abc import Sequence

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.worker_service.scheduling.policies import DecodeFirst, PolicyName, PrefillFirst
from penstock.worker_service.scheduling.steps import BatchPolicy


def batch_policy(
    name: PolicyName,
    latency: StepLatencyModel,
    best_effort_reserve: float,
    measured: Sequence[tuple[StepLoad, float]] = (),
) -> BatchPolicy:
    """The policy of this name, ready for its first step: compiled code is compiled, or read from its cache, now.

    measured: steps and their seconds, by which the first promises are as careful as later ones.
    """
    if name is PolicyName.DECODE_FIRST:
        return DecodeFirst()
    if name is PolicyName.PREFILL_FIRST:
        return PrefillFirst()
    from penstock.worker_service.scheduling.slo_policy import SloPolicy  # numba takes a second to import

    policy = SloPolicy(latency, best_effort_reserve)
    policy.warm()
    for load, seconds in measured:
        policy.observe(latency.step_s(load), seconds)
    return policy
