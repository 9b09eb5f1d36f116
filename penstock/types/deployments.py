"""Deployments of a cascade: replicas, thresholds and rules of each tier."""

from dataclasses import dataclass
from typing import Annotated

from penstock.types.planning import Dispatch
from penstock.types.ranges import COUNT, SCORE
from penstock.types.rules import PlanRules, TierRules


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """`count` replicas, each with `pp` pipeline stages of `tp` shards.

    ep: groups of a stage's GPUs that routed experts are divided between whole; 1: each expert is sliced over all of them.
    attn_dp: groups that have attention and the KV of their own requests each; 1: attention is sliced over all of them.
    gpu: the type of GPU, in a cluster of several; else empty.
    """

    tp: Annotated[int, COUNT]
    pp: Annotated[int, COUNT]
    count: Annotated[int, COUNT]
    ep: Annotated[int, COUNT] = 1
    attn_dp: Annotated[int, COUNT] = 1
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class DeployedTier(TierRules):
    """threshold: None for the last tier, and for a tier that is not used."""

    replicas: tuple[ReplicaGroup, ...] = ()
    threshold: Annotated[float | None, SCORE] = None


@dataclass(frozen=True, slots=True)
class Deployment(PlanRules):
    """tiers: in the cascade's order."""

    tiers: tuple[DeployedTier, ...]
    dispatch: Dispatch = Dispatch.CAPACITY
