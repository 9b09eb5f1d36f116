"""The models a client may name. No I/O."""

from dataclasses import dataclass

from services.domain.instances import InstanceRecord
from services.domain.mesh_view import MeshView
from services.domain.plans import CASCADE_MODEL


@dataclass(frozen=True, slots=True)
class ServedModel:
    """id: the name used in requests. model: of the tier; empty for the cascade."""

    id: str
    model: str
    cascade: bool
    max_context_tokens: int


def models_of(view: MeshView) -> list[ServedModel]:
    """The cascade and its tiers by the current plan; none before there is one. Context 0: no worker serves it now."""
    if view.plan is None:
        return []
    tiers = [
        ServedModel(
            tier.name,
            tier.model,
            False,
            min((w.model.max_context_tokens for w in _workers(view, tier.name) if w.model is not None), default=0),
        )
        for tier in view.plan.tiers
    ]
    return [ServedModel(CASCADE_MODEL, "", True, max(t.max_context_tokens for t in tiers)), *tiers]


def _workers(view: MeshView, tier: str) -> list[InstanceRecord]:
    """Those that would be tried: without a lease only if none has one."""
    return view.workers(tier) or view.expired_workers(tier)
