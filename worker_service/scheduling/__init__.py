"""Scheduling of steps: sequences, KV blocks, batches. Pure: no I/O, no torch, no clock."""

from penstock.worker_service.scheduling.batching import BatchLimits, BatchScheduler, Reservation
from penstock.worker_service.scheduling.blocks import BlockPool, OutOfBlocks, PrefixMatch
from penstock.worker_service.scheduling.policies import DecodeFirst, PolicyName, PrefillFirst
from penstock.worker_service.scheduling.sequence import IllegalTransition, Phase, Sequence, SequenceSlo
from penstock.worker_service.scheduling.steps import BatchPolicy, Chunk, StepInProgress, StepPlan

__all__ = [
    "BatchLimits",
    "BatchPolicy",
    "BatchScheduler",
    "BlockPool",
    "Chunk",
    "DecodeFirst",
    "IllegalTransition",
    "OutOfBlocks",
    "Phase",
    "PolicyName",
    "PrefillFirst",
    "PrefixMatch",
    "Reservation",
    "Sequence",
    "SequenceSlo",
    "StepInProgress",
    "StepPlan",
]
