"""Sites and judged prompts of files, as a question has them."""

from pathlib import Path

from penstock.planner_service.files.quality import judged_of
from penstock.planner_service.files.site import site_of
from penstock.planner_service.question.site import Site
from penstock.planner_service.routing.quality import JudgedSample
from penstock.question_files.questions import load_cluster, load_models
from penstock.question_files.tables import load_judged


def read_site(cluster: Path, models: Path) -> Site:
    return site_of(load_cluster(cluster), load_models(models))


def read_quality(path: Path, tiers: tuple[str, ...]) -> JudgedSample:
    """See load_judged for the columns."""
    return judged_of(load_judged(path, tiers), tiers)
