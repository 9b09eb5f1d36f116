"""The data of a planning question, checked, as the planner computes with it; and files that hold such data."""

from penstock.planner_service.files.catalogue import catalogue
from penstock.planner_service.files.hardware import engine_of_catalogue, gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.files.measured import measured_of, replica_of, trace_of, workload_of
from penstock.planner_service.files.quality import judged_for, read_quality
from penstock.planner_service.files.site import read_site, site_of
from penstock.planner_service.files.stage_replica import StageReplica, read_replica
from penstock.planner_service.files.trace import read_trace
from penstock.question_files.errors import FileError

__all__ = [
    "FileError",
    "StageReplica",
    "catalogue",
    "engine_of_catalogue",
    "gpu_of_catalogue",
    "judged_for",
    "measured_of",
    "model_of_catalogue",
    "read_quality",
    "read_replica",
    "read_site",
    "read_trace",
    "replica_of",
    "site_of",
    "trace_of",
    "workload_of",
]
