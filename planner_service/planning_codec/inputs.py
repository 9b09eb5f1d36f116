"""What a plan or a simulation is for: the site, and the demand by trace and judged prompts."""

import numpy as np

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.demand import demand_of
from planner_service.planning_codec.enums import LENGTHS, known
from planner_service.planning_codec.judged import judged_from_proto
from planner_service.planning_codec.parts import problems_under
from planner_service.planning_codec.site import site_from_proto
from planner_service.planning_codec.trace import trace_from_proto
from planner_service.site import Demand, Site
from services.domain.errors import InvalidRequest, invalid

REQUESTS, SEED = 500, 1  # of `penstock plan`
LENGTHS_OF_ANSWERS = "must be those of the judged answers where long answers are accepted"


def inputs_from_proto(inputs: pb.PlanningInputs) -> tuple[Site, Demand]:
    """InvalidRequest naming the field, as `inputs.cascade.tiers[0].model_name`."""
    site = site_from_proto(inputs.cluster, inputs.cascade)
    return site, demand_from_proto(inputs.workload, site.tiers)


def demand_from_proto(workload: pb.Workload, tiers: tuple[str, ...]) -> Demand:
    at = "inputs.workload"
    if workload.HasField("requests") and workload.requests < 1:
        raise invalid(f"{at}.requests", "must be at least 1")
    rate = workload.rate if workload.HasField("rate") else None
    if rate is not None and not (np.isfinite(rate) and rate > 0):
        raise invalid(f"{at}.rate", f"must be over 0, not {rate:g}")
    trace, judged = trace_from_proto(workload.trace, f"{at}.trace"), judged_from_proto(workload, tiers, f"{at}.judged")
    try:
        return demand_of(
            trace,
            judged,
            requests=workload.requests if workload.HasField("requests") else min(REQUESTS, len(trace)),
            seed=seed_of(workload),
            lengths=known(LENGTHS, workload.lengths, f"{at}.lengths"),
            rate=rate,
        )
    except InvalidRequest as error:
        raise problems_under(at, error) from None


def seed_of(workload: pb.Workload) -> int:
    return workload.seed if workload.HasField("seed") else SEED
