"""Length stages (CascadeInfer): the vocabulary and the rules that planner, router, workers and simulator share. Pure."""

from services.domain.stages.layout import Stage, StageLayout, stage_problems
from services.domain.stages.qoe import BatchLoad, InFlight, QoeModel, even_share

__all__ = ["BatchLoad", "InFlight", "QoeModel", "Stage", "StageLayout", "even_share", "stage_problems"]
