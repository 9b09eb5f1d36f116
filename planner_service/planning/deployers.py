"""The deployment solver of a site: of one type of GPU, or of several types and remote tiers. No I/O."""

from typing import Unpack

from penstock.planner_service.deployment.mixed import GpuTypes
from penstock.planner_service.question.site import Demand, Site, replica_kinds
from penstock.planner_service.routing.deployer import Deployer, DeployerOptions
from penstock.planner_service.routing.mixed_deployer import MixedDeployer
from penstock.services.domain.errors import invalid


def deployer_for(
    site: Site, demand: Demand, *, gpus: int | None, **how: Unpack[DeployerOptions]
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
    place, grading = (demand.requests, demand.arrival_s, kinds), site.grading
    if site.more or site.remotes:
        types = gpu_types(site, gpus)
        return MixedDeployer(*place, types, grading=grading, remotes=site.remotes, **how), reasons
    return Deployer(*place, gpus, grading=grading, **how), reasons


def gpu_types(site: Site, gpus: int) -> GpuTypes:
    """The types of GPU of a site, of which `gpus` may be used; where none of them has a price, each GPU costs 1."""
    prices = [each.dollars_per_gpu_hour or 0.0 for each in site.types]
    return GpuTypes(
        tuple(each.name for each in site.types),
        tuple(each.gpus for each in site.types),
        tuple(prices) if any(prices) else (1.0,) * len(prices),
        gpus,
    )
