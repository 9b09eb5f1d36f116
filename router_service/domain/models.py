"""The models a client may name. No I/O."""

from penstock.services.domain.instances import InstanceRecord
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.plans import CASCADE_MODEL
from penstock.types.mesh_status import ServedModel


def models_of(view: MeshView) -> list[ServedModel]:
    """The cascade and its tiers by the current plan; none before there is one. Context 0: no worker serves it now.

    The cascade's context is the least of its tiers': longer prompts go to those that take them, past the others.
    """
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
    served = [tier.max_context_tokens for tier in tiers if tier.max_context_tokens]
    return [ServedModel(CASCADE_MODEL, "", True, min(served, default=0)), *tiers]


def _workers(view: MeshView, tier: str) -> list[InstanceRecord]:
    """Those that would be tried: without a lease only if none has one."""
    return view.workers(tier) or view.expired_workers(tier)
