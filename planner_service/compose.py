"""Puts the planner together: plan store, publisher, servicer."""

from collections.abc import Iterable

from opentelemetry.metrics import Meter, Observation

from penstock.planner_service.live.load_scaler import LoadScaler
from penstock.planner_service.live.plan_publisher import PlanPublisher
from penstock.planner_service.live.replanner import Replanner
from penstock.planner_service.live.servicer import SERVICE, PlannerServicer
from penstock.planner_service.live.solver_pool import SolverPool
from penstock.proto.planner.v1 import planner_pb2_grpc
from penstock.question_files.errors import FileError
from penstock.question_files.questions import load_question
from penstock.services.clock import SystemClock
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.instances import Load
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.plans import same_models
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_file import digest
from penstock.services.mesh_schema.planner import MeshReplan
from penstock.services.runtime import Chassis
from penstock.services.state.feed import MeshFeed
from penstock.services.state.leadership import Leadership
from penstock.services.state.plans import PlanStore
from penstock.services.state.workload import WorkloadStore
from penstock.types.rules import RuleOptions

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
    clock = SystemClock()
    leadership = Leadership(chassis.redis, chassis.keys, chassis.instance_id, clock)
    publisher = PlanPublisher(store, leadership, feed, chassis.mesh, seed, clock)
    await chassis.stack.enter_async_context(feed)
    await chassis.stack.enter_async_context(publisher)
    scaler = await chassis.stack.enter_async_context(LoadScaler(chassis.mesh, publisher, clock))
    scales = chassis.mesh.planner.scaling.enabled
    chassis.load = lambda: Load(leads=publisher.leads, desired=scaler.desired if scales else None)
    _observe(chassis.telemetry.meter, publisher, scaler)
    solvers = SolverPool()
    replan = chassis.mesh.planner.replan
    if replan.enabled:
        replanner = _replanner(chassis, replan, publisher, solvers)
        await chassis.stack.enter_async_context(replanner)
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(PlannerServicer(publisher, store, solvers), chassis.admin)
    chassis.health.offer(SERVICE)


def _observe(meter: Meter, publisher: PlanPublisher, scaler: LoadScaler) -> None:
    """Export who leads, and what only the leader says: an autoscaler may add up what several planners export."""

    def desired_replicas() -> Iterable[Observation]:
        counts = () if (desired := scaler.desired) is None else desired.counts
        return [Observation(count, {"penstock.tier": tier}) for tier, count in counts]

    meter.create_observable_gauge(
        "penstock.planner.leads",
        callbacks=[lambda _: [Observation(int(publisher.leads))]],
        description="1 if this planner leads, else 0.",
    )
    meter.create_observable_gauge(
        "penstock.desired_replicas",
        callbacks=[lambda _: desired_replicas()],
        unit="{instance}",
        description="Workers that a tier should have: what an autoscaler follows.",
    )


def _replanner(chassis: Chassis, replan: MeshReplan, publisher: PlanPublisher, solvers: SolverPool) -> Replanner:
    """SettingsError for a question that cannot be used, or whose tiers are not the mesh's."""
    from penstock.planner_service.files.site import site_of  # brings numpy and numba
    from penstock.planner_service.question.exclusions import names_of_files
    from penstock.planner_service.question.planning_options import LEAST_REQUESTS, Options

    path = chassis.settings.resolve(replan.question)
    try:
        question = load_question(path)
        site = site_of(question.cluster, question.models)
        Options.of(question, len(site.tiers), names_of_files(site))
    except (FileError, InvalidRequest) as error:
        raise SettingsError(f"planner.replan.question: {error}") from None
    if question.rules != RuleOptions() or question.max_tiers is not None:
        left_out = "rules and max_tiers: planning again keeps the rules and tiers of the plan in force"
        raise SettingsError(f"planner.replan.question: leave out {left_out}")
    if len(question.trace.arrival_s) < LEAST_REQUESTS:
        had = len(question.trace.arrival_s)
        raise SettingsError(f"planner.replan.question: its trace has {had} requests, to plan on needs {LEAST_REQUESTS}")
    tiers = tuple(tier.name for tier in chassis.mesh.tiers)
    if site.tiers != tiers:
        there = ", ".join(site.tiers)
        raise SettingsError(f"planner.replan.question: its models have the tiers {there}, not {', '.join(tiers)}")
    for at, tier in enumerate(chassis.mesh.plan("").tiers):
        planned = [spec.name for spec, _ in site.speculation_of(at).drafters]
        if planned and not same_models(tier.drafters, planned):  # profiles may have been measured with drafts
            loaded, named = (", ".join(names) or "nothing" for names in (tier.drafters, planned))
            problem = f"tier {tier.name} is planned with drafts of {named}, its workers load {loaded}"
            raise SettingsError(f"planner.replan.question: {problem}")
    if question.gpus is not None and question.gpus > site.gpus:
        raise SettingsError(f"planner.replan.question: gpus: the cluster has {site.gpus}, not {question.gpus}")
    store = WorkloadStore(chassis.redis, chassis.keys)
    return Replanner(publisher, store, solvers, SystemClock(), replan.window_s, str(path))
