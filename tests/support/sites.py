"""Clusters with a cascade on them."""

from penstock.planner_service.files.hardware import gpu_of_catalogue, model_of_catalogue
from penstock.planner_service.question.site import Site
from penstock.services.domain.hardware import ClusterSpec


def a100_site(*models: str, nodes: int = 1, gpus: int = 4, judge_s: float = 0.0) -> Site:
    """Models of the catalogue on nodes of so many A100s."""
    cluster = ClusterSpec(gpu_of_catalogue("a100-80gb"), nodes, gpus, node_link_bytes_per_s=25e9)
    names = {1: ("large",), 2: ("small", "large"), 3: ("small", "medium", "large")}[len(models)]
    return Site(cluster, names, tuple(map(model_of_catalogue, models)), judge_s=judge_s)
