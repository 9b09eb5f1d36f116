"""Reads what `penstock plan` is given: cluster, models, trace, judged prompts. Faults name file, line and column."""

from planner_service.files.cascade import CascadeFile, EngineEntry, RemoteEntry, TierEntry
from planner_service.files.cluster import ClusterFile, GpuEntry, NodesEntry, gpu_of_catalogue
from planner_service.files.csv_files import csv_count, csv_number, csv_rows
from planner_service.files.errors import FileError
from planner_service.files.models import DrafterEntry, ModelEntry, SpeculationEntry, model_of_catalogue
from planner_service.files.quality import read_quality
from planner_service.files.site import read_site
from planner_service.files.stage_replica import StageReplica, read_replica
from planner_service.files.trace import read_trace
from planner_service.files.yaml_files import catalogue

__all__ = [
    "CascadeFile",
    "ClusterFile",
    "DrafterEntry",
    "EngineEntry",
    "FileError",
    "GpuEntry",
    "ModelEntry",
    "NodesEntry",
    "RemoteEntry",
    "SpeculationEntry",
    "StageReplica",
    "TierEntry",
    "catalogue",
    "csv_count",
    "csv_number",
    "csv_rows",
    "gpu_of_catalogue",
    "model_of_catalogue",
    "read_quality",
    "read_replica",
    "read_site",
    "read_trace",
]
