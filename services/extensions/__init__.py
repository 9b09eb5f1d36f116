"""Engines and scorers are extensions: types of options that packages register by entry point, and that build what runs.

`engine:` and `kind:` of the mesh file give an entry point's name. Processes that run neither pass the options through unread;
workers, judges, `penstock check` and `penstock up` read them as the extension's type.
"""

from penstock.services.extensions.engines import (
    ENGINE_FIELDS,
    EngineOptions,
    ServerContainer,
    engine_of,
    tier_host_problems,
    tier_in_shape,
    tier_problems,
)
from penstock.services.extensions.lookup import DRAFTERS, ENGINES, SCORERS, entry_points_of, extension
from penstock.services.extensions.scorers import (
    ScorerOptions,
    asked_scorers,
    asks_for_logprobs,
    is_calibrated,
    scorer_host_problems,
    scorer_of,
    scorer_problems,
    unused_judge_fields,
)

__all__ = [
    "DRAFTERS",
    "ENGINES",
    "ENGINE_FIELDS",
    "SCORERS",
    "EngineOptions",
    "ScorerOptions",
    "ServerContainer",
    "asked_scorers",
    "asks_for_logprobs",
    "engine_of",
    "entry_points_of",
    "extension",
    "is_calibrated",
    "scorer_host_problems",
    "scorer_of",
    "scorer_problems",
    "tier_host_problems",
    "tier_in_shape",
    "tier_problems",
    "unused_judge_fields",
]
