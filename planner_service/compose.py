"""Puts the planner together: plan store, publisher, servicer."""

from penstock.proto.planner.v1 import planner_pb2_grpc
from planner_service.plan_publisher import PlanPublisher
from planner_service.replanner import Replanner, job_maker
from planner_service.rescheduling import DriftRule
from planner_service.servicer import SERVICE, PlannerServicer
from planner_service.solver_pool import SolverPool
from services.clock import SystemClock
from services.domain.mesh_view import MeshView
from services.domain.plans import same_models
from services.field_problems import SettingsError
from services.mesh_file import digest
from services.mesh_schema import MeshReplan
from services.runtime import Chassis
from services.state import MeshFeed, PlanStore, WorkloadStore

PULL_S = 0.5
"""How often the planner looks at the mesh, at most. No request waits for what it sees."""


async def compose(chassis: Chassis) -> None:
    """Keep the plan and serve it."""
    store = PlanStore(chassis.redis, chassis.keys)
    feed = MeshFeed(
        chassis.redis,
        chassis.keys,
        MeshView(),
        interval_s=max(PULL_S, chassis.settings.pull_interval_s),
        on_change=lambda: publisher.view_changed(),
    )
    seed = chassis.mesh.plan(digest(chassis.settings.mesh_file))
    scorers = [scorer.name for scorer in chassis.mesh.judge.scorers]
    publisher = PlanPublisher(store, feed, seed, SystemClock(), chassis.mesh.planner.max_instances, scorers)
    await chassis.stack.enter_async_context(feed)
    await chassis.stack.enter_async_context(publisher)
    solvers = SolverPool()
    replan = chassis.mesh.planner.replan
    if replan.enabled:
        replanner = _replanner(chassis, replan, publisher, solvers)
        await chassis.stack.enter_async_context(replanner)
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(PlannerServicer(publisher, store, solvers), chassis.admin)
    chassis.health.offer(SERVICE)


def _replanner(chassis: Chassis, replan: MeshReplan, publisher: PlanPublisher, solvers: SolverPool) -> Replanner:
    """SettingsError for a file that cannot be used, or whose tiers are not the mesh's."""
    from planner_service.files import FileError, read_quality, read_site, read_trace  # brings numpy and numba
    from planner_service.planning_options import LEAST_REQUESTS

    paths = {
        name: chassis.settings.resolve(getattr(replan, name)) for name in ("cluster", "models", "trace", "quality")
    }
    try:
        site = read_site(paths["cluster"], paths["models"])
        trace = read_trace(paths["trace"])
        read_quality(paths["quality"], site.tiers)
    except FileError as error:
        raise SettingsError(f"planner.replan: {error}") from None
    if len(trace) < LEAST_REQUESTS:
        raise SettingsError(f"planner.replan.trace: has {len(trace)} requests, to plan on needs {LEAST_REQUESTS}")
    tiers = tuple(tier.name for tier in chassis.mesh.tiers)
    if site.tiers != tiers:
        raise SettingsError(f"planner.replan.models: has the tiers {', '.join(site.tiers)}, not {', '.join(tiers)}")
    for at, tier in enumerate(chassis.mesh.plan("").tiers):
        planned = [spec.name for spec, _ in site.speculation_of(at).drafters]
        if planned and not same_models(tier.drafters, planned):  # profiles may have been measured with drafts
            loaded, named = (", ".join(names) or "nothing" for names in (tier.drafters, planned))
            problem = f"tier {tier.name} is planned with drafts of {named}, its workers load {loaded}"
            raise SettingsError(f"planner.replan.models: {problem}")
    if replan.gpus is not None and replan.gpus > site.gpus:
        raise SettingsError(f"planner.replan.gpus: the cluster has {site.gpus}, not {replan.gpus}")
    rule = DriftRule(
        rate_change=replan.rate_change,
        length_change=replan.length_change,
        score_change=replan.score_change,
        confirm=replan.confirm_windows,
        cooldown=replan.cooldown_windows,
    )
    job = job_maker(
        **{name: str(path) for name, path in paths.items()},
        min_quality=replan.min_quality,
        max_latency_s=replan.max_latency_s,
        gpus=replan.gpus,
        requests=replan.requests,
    )
    store = WorkloadStore(chassis.redis, chassis.keys)
    return Replanner(publisher, store, solvers, SystemClock(), rule, replan.window_s, job)
