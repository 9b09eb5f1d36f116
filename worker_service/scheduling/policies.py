"""How steps are shared out where no request has an SLO: decodes first, or prompts first. No I/O."""

import enum

from penstock.worker_service.scheduling.sequence import Phase
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
        for sequence in running:
            if step.budget > 0 and sequence.decoding:
                step.give(sequence, 1)
        for sequence in running:
            if step.budget > 0 and sequence.phase is Phase.RUNNING and not sequence.decoding:
                step.give(sequence, step.budget)
        start_waiting(step)


class PrefillFirst(BatchPolicy):
    """Prompts that have begun, then prompts that wait; decodes only in steps without a prompt."""

    def plan(self, step: StepInProgress, now_s: float) -> None:
        running = sorted(step.scheduler.running, key=queue_key)
        for sequence in running:
            if step.budget > 0 and sequence.phase is Phase.RUNNING and not sequence.decoding:
                step.give(sequence, step.budget)
        start_waiting(step)
        if step.chunks:
            return
        for sequence in running:
            if step.budget > 0 and sequence.phase is Phase.RUNNING and sequence.decoding:
                step.give(sequence, 1)


def start_waiting(step: StepInProgress) -> None:
    """Start waiting sequences, in queue order, while there is room and no sequence has been preempted."""
    scheduler = step.scheduler
    while step.budget > 0 and scheduler.waiting and not step.preempted:
        sequence = scheduler.waiting[0]
        if not step.start(sequence):
            return
        step.give(sequence, step.budget)
