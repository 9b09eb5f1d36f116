"""`penstock plan --render`: manifests for a plan."""

from pathlib import Path

from penstock.cli.output import fail

FORMS = ("compose", "kubernetes")


def check(form: str) -> None:
    if form not in FORMS:
        fail(f"--render must be {' or '.join(FORMS)}, not {form}", 2)


def render(plan: Path, form: str) -> list[Path]:
    """Write the manifests of a plan file beside it; return what was written."""
    check(form)
    from penstock.cli.planning import told_faults
    from planner_service.files import read_site
    from planner_service.plan_file import read_plan
    from planner_service.render import compose, kubernetes, mesh_file

    with told_faults():
        read = read_plan(plan)
        site = read_site(Path(read.inputs.cluster), Path(read.inputs.models))
        mesh = mesh_file("penstock", site, read.shapes, read.thresholds)
        mesh_text = _yaml(mesh)
        if form == "kubernetes":
            written = {
                plan.with_suffix(".kubernetes.yaml"): _yaml(*kubernetes(site, read.shapes, mesh_text, "penstock"))
            }
        else:
            mesh_path = plan.with_suffix(".mesh.yaml")
            found = compose(site, read.shapes, f"./{mesh_path.name}")
            written = {mesh_path: mesh_text, plan.with_suffix(".compose.yaml"): _yaml(found)}
    for path, text in written.items():
        path.write_text(text)
    return list(written)


def _yaml(*documents: object) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes what occurs twice twice: anchors are for people who write YAML."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=120)
