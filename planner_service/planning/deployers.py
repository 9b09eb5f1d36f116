"""The deployment solver of a site: of one type of GPU, or of several types and remote tiers. No I/O."""

from collections.abc import Callable
from typing import TypedDict

from penstock.planner_service.deployment.mixed import GpuTypes
from penstock.planner_service.question.site import Demand, Site, replica_kinds
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.grading import Grading
from penstock.planner_service.routing.mixed_deployer import MixedDeployer
from penstock.planner_service.simulator import Dispatch
from penstock.services.domain.errors import invalid
from penstock.types.planning import Objective


class DeployerOptions(TypedDict):
    """See Deployer."""

    dispatch: Dispatch
    objective: Objective
    percentile: float
    max_utilisation: float | None
    grading: Grading | None
    on_evaluation: Callable[[int], None]


def deployer_for(
    site: Site,
    demand: Demand,
    *,
    gpus: int | None,
    dispatch: Dispatch,
    objective: Objective = Objective.LARGEST_TIER,
    percentile: float = 95.0,
    max_utilisation: float | None = None,
    on_evaluation: Callable[[int], None] = lambda _: None,
) -> tuple[Deployer, dict[str, str]]:
    """(the deployment solver, tiers that fit nowhere with the reason)."""
    gpus = site.gpus if gpus is None else gpus
    if not 1 <= gpus <= site.gpus:
        raise invalid("gpus", f"the cluster has {site.gpus}, not {gpus}")
    if demand.judged.tiers != site.tiers:
        raise invalid("quality", f"judged are the tiers {', '.join(demand.judged.tiers)}, not {', '.join(site.tiers)}")
    kinds, reasons = [], {}
    for tier, name in enumerate(site.tiers):
        longest = int((demand.requests.input_tokens + demand.requests.output_tokens[:, tier]).max())
        if site.grading is not None and site.grading.tier == tier:
            longest = max(longest, site.grading.longest_tokens(demand.requests))
        able, reason = replica_kinds(site, tier, gpus, longest) if site.remote_of(tier) is None else ([], "")
        kinds.append(able)
        if not able and site.remote_of(tier) is None:
            reasons[name] = reason
    place = (demand.requests, demand.arrival_s, kinds)
    how: DeployerOptions = {
        "dispatch": dispatch,
        "objective": objective,
        "percentile": percentile,
        "max_utilisation": max_utilisation,
        "grading": site.grading,
        "on_evaluation": on_evaluation,
    }
    if site.more or site.remotes:
        return MixedDeployer(*place, gpu_types(site, gpus), remotes=site.remotes, **how), reasons
    return Deployer(*place, gpus, **how), reasons


def gpu_types(site: Site, gpus: int) -> GpuTypes:
    """The types of GPU of a site, of which `gpus` may be used; where none of them has a price, each GPU costs 1."""
    prices = [each.dollars_per_gpu_hour or 0.0 for each in site.types]
    return GpuTypes(
        tuple(each.name for each in site.types),
        tuple(each.gpus for each in site.types),
        tuple(prices) if any(prices) else (1.0,) * len(prices),
        gpus,
    )
