"""How steps are shared out where no request has an SLO: decodes first, or prompts first. No I/O."""

import enum
from collections.abc import Sequence as Seq

from penstock.services.domain.latency import StepLatencyModel, StepLoad
from penstock.worker_service.scheduling.sequence import Phase, Sequence
from penstock.worker_service.scheduling.steps import BatchPolicy, StepInProgress, queue_key


class PolicyName(enum.Enum):
    """The policies that a tier of the mesh file can name.

    DECODE_FIRST: every decode gets its token, prompts get what is left, in chunks (Sarathi-Serve).
    PREFILL_FIRST: while there are prompts, a step computes nothing else (vLLM without chunked prefill).
    SLO: by deadlines (SLOs-Serve); without a request that was admitted with an SLO, decode first.
    """

    DECODE_FIRST = "decode_first"
    PREFILL_FIRST = "prefill_first"
    SLO = "slo"


class DecodeFirst(BatchPolicy):
    """Decodes, then prompts that have begun, then prompts that wait, each in queue order."""

    def plan(self, step: StepInProgress, now_s: float) -> None:
        running = sorted(step.scheduler.running, key=queue_key)
        _give_decodes(step, running)
        _give_prompts(step, running)


class PrefillFirst(BatchPolicy):
    """Prompts that have begun, then prompts that wait; decodes only in steps without a prompt."""

    def plan(self, step: StepInProgress, now_s: float) -> None:
        running = sorted(step.scheduler.running, key=queue_key)
        _give_prompts(step, running)
        if not step.chunks:
            _give_decodes(step, running)


def _give_decodes(step: StepInProgress, running: Seq[Sequence]) -> None:
    for sequence in running:
        if step.budget > 0 and sequence.decoding:
            step.give(sequence, 1)


def _give_prompts(step: StepInProgress, running: Seq[Sequence]) -> None:
    """Continue prompts; then start waiting sequences while there is room and no sequence has been preempted."""
    for sequence in running:
        if step.budget > 0 and sequence.phase is Phase.RUNNING and not sequence.decoding:
            step.give(sequence, step.budget)
    scheduler = step.scheduler
    while step.budget > 0 and scheduler.waiting and not step.preempted:
        sequence = scheduler.waiting[0]
        if not scheduler.start(sequence):
            return
        step.give(sequence, step.budget)


def batch_policy(
    name: PolicyName, latency: StepLatencyModel, best_effort_reserve: float, measured: Seq[tuple[StepLoad, float]] = ()
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
