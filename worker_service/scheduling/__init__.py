"""Scheduling of steps: sequences, KV blocks, batches. Pure: no I/O, no torch, no clock."""

from worker_service.scheduling.batching import BatchLimits, BatchScheduler, Chunk, Reservation, StepPlan
from worker_service.scheduling.blocks import BlockPool, OutOfBlocks, PrefixMatch
from worker_service.scheduling.sequence import IllegalTransition, Phase, Sequence

__all__ = [
    "BatchLimits",
    "BatchScheduler",
    "BlockPool",
    "Chunk",
    "IllegalTransition",
    "OutOfBlocks",
    "Phase",
    "PrefixMatch",
    "Reservation",
    "Sequence",
    "StepPlan",
]
