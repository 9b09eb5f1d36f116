"""What `penstock plan` chooses for a family, as a way to serve that can be compared with others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.public_data import public
from benchmarks.rivals.families import TRACE, Family, Prompts
from benchmarks.rivals.systems import Cascade, System, Tuned
from penstock.planner_service.api.plans import plan_for
from penstock.planner_service.files.measured import read_trace
from penstock.planner_service.planning.cascade_choice import form_words
from penstock.planner_service.planning.cascade_plan import CascadePlan
from penstock.planner_service.question.planning_options import Options
from penstock.planner_service.question.site import with_drafts
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator.workload import Ints
from penstock.services.acceptance.skip_for import EPSILON as SAME_GAIN
from penstock.services.domain.errors import InvalidRequest
from penstock.types.rules import RuleOptions

BUSY_GPUS = 18.0
"""With the largest model alone, of the 32 of the example cluster: of fewer, plans have little to choose from."""
REQUESTS = 1000
EXPECTED = 0.5
"""The confidence at which a plan reaches the target on average, as what rivals are tuned for."""


def planned(family: Family, rows: Ints, prompts: Prompts, target: float, acceptance: float) -> tuple[str, Tuned]:
    """(its form, the plan) of least cost for the judged prompts `rows`, by the default question and with skip prediction;
    the largest model alone where that is refused. Tiers draft for each other where that costs less here, as workers decide.
    prompts: the same ones. acceptance: of the tokens of drafts."""
    site = replace(family.site, draft_acceptance=(acceptance,) * len(family.tiers), drafts_on_many=True)
    judged = with_drafts(family.judged(rows, prompts.predicted), site)
    rate_per_s = BUSY_GPUS / float(prompts.fresh_s[:, -1].mean())
    options = Options(
        min_quality=target,
        confidence=EXPECTED,
        rate=rate_per_s,
        requests=REQUESTS,
        rules=RuleOptions(skip=True),
    )
    try:
        plan = plan_for(site, read_trace(public(TRACE)), judged, options).plan
    except (Unreachable, InvalidRequest) as error:
        print(f"{family.name}: {error}", flush=True)
        system = Cascade((len(family.tiers) - 1,), (), (), False)
        return f"{family.tiers[-1]} alone, as no plan is found", Tuned(system, *system.run(prompts))
    systems = [_served(family, plan, drafts=drafts) for drafts in (False, True)]
    form = form_words([tier.name for tier in plan.tiers if tier.strategy.used], routed=plan.is_routed)
    if any(limit is not None for limit in plan.rules.skip_below) and not plan.is_routed:
        form += ", skips"
    return form, min((Tuned(system, *system.run(prompts)) for system in systems), key=lambda tuned: tuned.gpu_s)


@dataclass(frozen=True, slots=True)
class Routed:
    """A cascade that passes tiers over by 100 less the points by which the predicted score of `better` is higher."""

    cascade: Cascade
    better: int

    def run(self, prompts: Prompts) -> tuple[float, float]:
        better = prompts.predicted[:, self.better, None]
        return self.cascade.run(replace(prompts, predicted=100.0 + prompts.predicted - better))


def _served(family: Family, plan: CascadePlan, *, drafts: bool) -> System:
    names = [tier.name for tier in plan.tiers]
    used = [at for at, tier in enumerate(plan.tiers) if tier.strategy.used]
    limits: Sequence[float | None] = plan.rules.skip_below or (None,) * (len(names) - 1)
    if plan.rules.skip_for:
        limits = [None if rule is None else 100.0 - rule.gain - SAME_GAIN for rule in plan.rules.skip_for]
    cascade = Cascade(
        tuple(family.tiers.index(names[at]) for at in used),
        tuple(plan.thresholds[at] for at in used[:-1]),
        tuple(-1.0 if (limit := limits[at]) is None else limit for at in used[:-1]),
        drafts,
    )
    better = {family.tiers.index(rule.tier) for rule in plan.rules.skip_for if rule is not None}
    return Routed(cascade, *better) if better else cascade
