"""SLOs of classes of requests: what a cascade attains, and the GPUs that they need."""

from collections.abc import Sequence

from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.files.measured import workload_of
from penstock.planner_service.files.site import site_of
from penstock.planner_service.question.demand import stretch_of
from penstock.planner_service.question.site import Demand, Site
from penstock.planner_service.replay.slo_classes import WorkloadClass, check_classes
from penstock.planner_service.replay.slo_simulation import Capacity, fewest_gpus, simulate_slos
from penstock.services.domain.errors import invalid
from penstock.types.planning import Cascade, Cluster, Trace
from penstock.types.simulated import SloAttainment

REPLAYED = 2000  # requests that are replayed where nothing says how many


def attainments(
    site: Site,
    demand: Demand,
    thresholds: Sequence[float],
    strategies: Sequence[Strategy],
    classes: Sequence[WorkloadClass],
    seed: int,
) -> tuple[SloAttainment, ...]:
    """What each class receives of a deployment; none without classes."""
    return tuple(simulate_slos(site, demand, thresholds, strategies, classes, seed)) if classes else ()


def capacity(
    cluster: Cluster,
    models: Cascade,
    trace: Trace,
    classes: Sequence[WorkloadClass],
    *,
    attainment: float,
    tier: str | None = None,
    requests: int | None = None,
    rate: float | None = None,
    seed: int = 1,
) -> Capacity:
    """The fewest GPUs of one shape. tier: of the cascade; None for the last. requests: of the trace; None for REPLAYED.

    Raises:
        InvalidRequest: Something is unsound; names it.
        Unreachable: The cluster's GPUs do not reach the attainment.
    """
    check_classes(classes)
    site, arrivals = site_of(cluster, models), workload_of(trace)
    name = site.tiers[-1] if tier is None else tier
    if name not in site.tiers:
        raise invalid("tier", f"no tier '{name}' in the cascade; there are {', '.join(site.tiers)}")
    work = stretch_of(arrivals, min(REPLAYED, len(arrivals)) if requests is None else requests, seed, rate)
    return fewest_gpus(site, site.tiers.index(name), work, classes, attainment, seed)
