"""`penstock plan --render`: write the compose file of a plan."""

from pathlib import Path

from penstock.cli.output import fail
from penstock.cli.planner_errors import planner_error_handling


def check(form: str) -> None:
    if form != "compose":
        fail(f"--render must be compose, not {form}; for Kubernetes: penstock values --plan", 2)


def render(plan: Path, form: str) -> list[Path]:
    """Write the mesh file and the compose file of a plan next to it; return their paths."""
    check(form)
    from penstock.planner_service import api
    from penstock.planner_service.codecs.plan_file import read_plan

    with planner_error_handling():
        texts = api.manifests(read_plan(plan), plan.with_suffix(".mesh.yaml").name)
    written = {plan.with_suffix(suffix): text for suffix, text in texts.items()}
    for path, text in written.items():
        path.write_text(text)
    return list(written)
