"""What drafts in the replicas of a plan: models, memory, and the chain and window of each batch size. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.planner_service.question.site import Site, TierSpeculation
from penstock.planner_service.simulator import Replica
from penstock.planner_service.simulator.speculation import chosen_drafts
from penstock.services.domain.errors import InvalidRequest, invalid
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.planned import DraftChoice
from penstock.types.problems import FieldProblem


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that drafts. acceptance: the share of its tokens that the tier's model is expected to accept, 0 to 1."""

    name: str
    acceptance: float
    weight_bytes: float
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class ReplicaDrafts:
    """Drafts of equal replicas. memory_bytes: of all drafting models in one replica, weights and KV."""

    shape: ReplicaShape
    memory_bytes: float
    choices: tuple[DraftChoice, ...]


@dataclass(frozen=True, slots=True)
class PlannedSpeculation:
    """What drafts in a tier. models: small to large. replicas: by shape, in the plan's order."""

    models: tuple[DraftModel, ...]
    max_window: int
    replicas: tuple[ReplicaDrafts, ...]


@dataclass(frozen=True, slots=True)
class PlannedDrafters:
    """The part of a plan that workers are started with: the models that draft, small to large, and the longest window."""

    names: tuple[str, ...] = ()
    max_window: int = TierSpeculation().max_window


def planned_speculation(site: Site, tier: int, replicas: Sequence[tuple[Replica, int]]) -> PlannedSpeculation | None:
    """What drafts in the (replica, count) of a tier; None where nothing does."""
    speculation = site.speculation_of(tier)
    if not speculation.drafters:
        return None
    models = tuple(
        DraftModel(spec.name, acceptance, spec.weight_bytes, spec.kv_bytes_per_token)
        for spec, acceptance in speculation.drafters
    )
    drafts = []
    for replica, _ in replicas:
        target, drafters = site.step_times(tier, replica.shape)
        chosen = chosen_drafts(
            target,
            drafters,
            context_tokens=speculation.context_tokens,
            max_running=site.limits.max_running,
            max_window=speculation.max_window,
        )
        choices = tuple(
            DraftChoice(choice.replies, (), 0)
            if choice.candidate is None
            else DraftChoice(
                choice.replies, tuple(models[m].name for m in choice.candidate.chain), choice.candidate.window
            )
            for choice in chosen
        )
        memory = sum(model.weight_bytes + replica.kv_tokens * model.kv_bytes_per_token for model in models)
        drafts.append(ReplicaDrafts(replica.shape, memory, choices))
    return PlannedSpeculation(models, speculation.max_window, tuple(drafts))


def with_planned_drafters(site: Site, planned: Sequence[PlannedDrafters]) -> Site:
    """The site with exactly the drafters of a plan, by tier.

    Raises:
        InvalidRequest: The plan has another number of tiers, or a drafter that the models file does not have for this tier.
    """
    if len(planned) != len(site.tiers):
        raise invalid("tiers", f"the models file has {', '.join(site.tiers)}, the plan has {len(planned)} tiers")
    problems, speculation = [], []
    for i, drafters in enumerate(planned):
        known = {spec.name: (spec, acceptance) for spec, acceptance in site.speculation_of(i).drafters}
        for j, name in enumerate(drafters.names):
            if name not in known:
                there = ", ".join(known) or "none"
                field = f"tiers[{i}].speculation.drafters[{j}].model"
                problems.append(
                    FieldProblem(
                        field, f"'{name}' does not draft for tier '{site.tiers[i]}': in the models file, {there}"
                    )
                )
        chosen = tuple(known[name] for name in drafters.names if name in known)
        speculation.append(replace(site.speculation_of(i), drafters=chosen, max_window=drafters.max_window))
    if problems:
        raise InvalidRequest(*problems)
    return replace(site, speculation=tuple(speculation) if any(each.drafters for each in speculation) else ())
