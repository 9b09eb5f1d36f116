"""What drafts in the replicas of a plan: models, memory, and the chain and window of each batch size. No I/O."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.planner_service.question.site import Site, TierSpeculation
from penstock.planner_service.simulator import Replica
from penstock.planner_service.simulator.speculation import chosen_drafts
from penstock.services.domain.errors import check, invalid
from penstock.types.planned import DraftChoice, PlannedDrafter, PlannedSpeculation, ReplicaDrafts
from penstock.types.problems import FieldProblem


def planned_speculation(site: Site, tier: int, replicas: Sequence[tuple[Replica, int]]) -> PlannedSpeculation | None:
    """What drafts in the (replica, count) of a tier; None where nothing does."""
    speculation = site.speculation_of(tier)
    if not speculation.drafters:
        return None
    models = tuple(
        PlannedDrafter(spec.name, acceptance, spec.weight_bytes / 1e9, spec.kv_bytes_per_token)
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
        choices = []
        for choice in chosen:
            chain, window = ((), 0) if choice.candidate is None else (choice.candidate.chain, choice.candidate.window)
            choices.append(DraftChoice(choice.replies, tuple(models[m].model for m in chain), window))
        specs, shape = [spec for spec, _ in speculation.drafters], replica.shape
        memory_gb = sum(spec.weight_bytes + replica.kv_tokens * spec.kv_bytes_per_token for spec in specs) / 1e9
        of_shape = (shape.gpu, shape.ep, shape.attn_dp)
        drafts.append(ReplicaDrafts(shape.tp, shape.pp, memory_gb, tuple(choices), *of_shape))
    return PlannedSpeculation(speculation.max_window, models, tuple(drafts))


def with_planned_drafters(site: Site, planned: Sequence[PlannedSpeculation | None]) -> Site:
    """The site with exactly the drafters of a plan, by tier.

    Raises:
        InvalidRequest: The plan has another number of tiers, or a drafter that the models file does not have for this tier.
    """
    if len(planned) != len(site.tiers):
        raise invalid("tiers", f"the models file has {', '.join(site.tiers)}, the plan has {len(planned)} tiers")
    problems, speculation = [], []
    for i, of_tier in enumerate(planned):
        names = () if of_tier is None else [drafter.model for drafter in of_tier.drafters]
        max_window = TierSpeculation().max_window if of_tier is None else of_tier.max_window
        known = {spec.name: (spec, acceptance) for spec, acceptance in site.speculation_of(i).drafters}
        for j, name in enumerate(names):
            if name not in known:
                there = ", ".join(known) or "none"
                problem = f"'{name}' does not draft for tier '{site.tiers[i]}': in the models file, {there}"
                problems.append(FieldProblem(f"tiers[{i}].speculation.drafters[{j}].model", problem))
        chosen = tuple(known[name] for name in names if name in known)
        speculation.append(replace(site.speculation_of(i), drafters=chosen, max_window=max_window))
    check(problems)
    return replace(site, speculation=tuple(speculation) if any(each.drafters for each in speculation) else ())
