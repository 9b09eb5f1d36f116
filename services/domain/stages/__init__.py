"""Length stages (CascadeInfer): types and rules shared by planner, router, workers and simulator. Pure."""

from services.domain.stages.layout import Stage, StageLayout, stage_problems
from services.domain.stages.qoe import BatchLoad, InFlight, QoeModel, even_share

__all__ = ["BatchLoad", "InFlight", "QoeModel", "Stage", "StageLayout", "even_share", "stage_problems"]
