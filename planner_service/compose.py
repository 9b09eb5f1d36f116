"""Puts the planner together: plan store, keeper, servicer."""

from penstock.planner.v1 import planner_pb2_grpc
from planner_service.keeper import PlanKeeper
from planner_service.servicer import SERVICE, PlannerServicer
from planner_service.solver_pool import SolverPool
from services.clock import SystemClock
from services.domain.mesh_view import MeshView
from services.runtime import Chassis
from services.settings import digest
from services.state import MeshFeed, PlanStore


async def compose(chassis: Chassis) -> None:
    """Keep the plan and serve it."""
    store = PlanStore(chassis.redis, chassis.keys)
    feed = MeshFeed(chassis.redis, chassis.keys, MeshView(), on_change=lambda: keeper.view_changed())
    seed = chassis.mesh.plan(digest(chassis.settings.mesh_file))
    keeper = PlanKeeper(store, feed, seed, SystemClock())
    await chassis.stack.enter_async_context(feed)
    await chassis.stack.enter_async_context(keeper)
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(PlannerServicer(keeper, store, SolverPool()), chassis.server)
    chassis.health.offer(SERVICE)
