"""PlanCascade and SimulateDeployment: proto to what the planner computes with, and back. Fields are checked as in files."""

from planner_service.planning_codec.deployment import rules_from_proto, shapes_from_proto
from planner_service.planning_codec.enums import dispatch_from_proto
from planner_service.planning_codec.inputs import inputs_from_proto
from planner_service.planning_codec.options import options_from_proto
from planner_service.planning_codec.plan import plan_to_proto
from planner_service.planning_codec.replicas import replica_from_proto, replica_to_proto
from planner_service.planning_codec.report import percentiles_to_proto, report_to_proto, user_latency_to_proto
from planner_service.planning_codec.site import site_from_proto
from planner_service.planning_codec.trace import trace_from_proto, trace_to_proto

__all__ = [
    "dispatch_from_proto",
    "inputs_from_proto",
    "options_from_proto",
    "percentiles_to_proto",
    "plan_to_proto",
    "replica_from_proto",
    "replica_to_proto",
    "report_to_proto",
    "rules_from_proto",
    "shapes_from_proto",
    "site_from_proto",
    "trace_from_proto",
    "trace_to_proto",
    "user_latency_to_proto",
]
