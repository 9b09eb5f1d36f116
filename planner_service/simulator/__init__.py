"""Tiers in virtual time: discrete events over the compiled version of the worker's batch scheduler."""

from penstock.planner_service.simulator.report import percentiles, report
from penstock.planner_service.simulator.tier import Dispatch, EngineLimits, Replica, Served, serve
from penstock.planner_service.simulator.workload import Workload

__all__ = ["Dispatch", "EngineLimits", "Replica", "Served", "Workload", "percentiles", "report", "serve"]
