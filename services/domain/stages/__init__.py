"""Length stages (CascadeInfer): types and rules shared by planner, router, workers and simulator. Pure."""

from penstock.services.domain.stages.layout import StageLayout, stage_problems
from penstock.services.domain.stages.qoe import BatchLoad, InFlight, even_share

__all__ = ["BatchLoad", "InFlight", "StageLayout", "even_share", "stage_problems"]
