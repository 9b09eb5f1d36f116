"""`penstock plan --render`: write the manifests of a plan."""

from pathlib import Path

from penstock.cli.output import fail
from penstock.cli.planner_errors import planner_error_handling

FORMS = ("compose", "kubernetes")


def check(form: str) -> None:
    if form not in FORMS:
        fail(f"--render must be {' or '.join(FORMS)}, not {form}", 2)


def render(plan: Path, form: str) -> list[Path]:
    """Write the manifests of a plan next to its file; return their paths."""
    check(form)
    from planner_service.plan_file import read_plan, read_planned_site
    from planner_service.render import compose, kubernetes, mesh_file

    with planner_error_handling():
        planned = read_plan(plan)
        site = read_planned_site(planned)
        of_plan = (planned.shapes, planned.thresholds, planned.long_answers)
        mesh = mesh_file("penstock", site, *of_plan, best_answer=planned.best_answer)
        mesh_text = _yaml(mesh)
        if form == "kubernetes":
            written = {
                plan.with_suffix(".kubernetes.yaml"): _yaml(*kubernetes(site, planned.shapes, mesh_text, "penstock"))
            }
        else:
            mesh_path = plan.with_suffix(".mesh.yaml")
            document = compose(site, planned.shapes, f"./{mesh_path.name}")
            written = {mesh_path: mesh_text, plan.with_suffix(".compose.yaml"): _yaml(document)}
    for path, text in written.items():
        path.write_text(text)
    return list(written)


def _yaml(*documents: object) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes repeated values in full instead of YAML anchors."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=120)
