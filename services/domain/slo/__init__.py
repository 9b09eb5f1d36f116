"""Latency promises: what is promised, whether it was kept, which requests are admitted. Pure Python, no I/O.

Importing this package loads neither numpy nor numba, which routers do not have. The compiled scheduler, for workers and the
planner, is in `services.domain.slo.compiled` and is imported by name.
"""

from services.domain.slo.admission import (
    Admission,
    BudgetModel,
    Candidate,
    Committed,
    Tier,
    admit,
)
from services.domain.slo.attainment import PACE_WINDOW_TOKENS, Attainment, AttainmentTracker
from services.domain.slo.correction import LatencyCorrection
from services.domain.slo.promises import PhaseTracker, Promise, SloClass
from services.domain.slo.reply_length import ReplyLengths
from services.domain.slo.sliding_sample import SlidingSample
from services.domain.slo.speculation import SpeculationTier, expected_tokens, speculation_lengths

__all__ = [
    "PACE_WINDOW_TOKENS",
    "Admission",
    "Attainment",
    "AttainmentTracker",
    "BudgetModel",
    "Candidate",
    "Committed",
    "LatencyCorrection",
    "PhaseTracker",
    "Promise",
    "ReplyLengths",
    "SlidingSample",
    "SloClass",
    "SpeculationTier",
    "Tier",
    "admit",
    "expected_tokens",
    "speculation_lengths",
]
