"""The third tutorial (docs/tutorials/plan-and-apply.md): plan for eight GPUs, apply the plan to a mesh, roll it back.

`python examples/plan_and_apply.py [MESH_FILE]`, from the root of the repository; the default is examples/mesh-planned.yaml.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

FILES = Path(__file__).parent


def penstock(*arguments: str) -> str:
    """Run a command of `penstock` and return what it prints."""
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def show(admin: str) -> None:
    plan = json.loads(penstock("plan", "show", "--admin", admin, "--json"))
    tiers = [(tier["name"], tier["threshold"], tier["instances"]) for tier in plan["tiers"]]
    print(f"revision {plan['revision']}, {plan['source']}: tier, threshold, workers: {tiers}")


def main(mesh_file: str = "examples/mesh-planned.yaml") -> None:
    with TemporaryDirectory() as folder:
        plan_file = f"{folder}/plan.json"
        print(
            penstock(
                "plan",
                *("--cluster", str(FILES / "cluster-1x8-h100.yaml"), "--models", str(FILES / "qwen2.5-cascade.yaml")),
                *("--trace", str(FILES / "trace.csv"), "--quality", str(FILES / "judged.csv")),
                *("--min-quality", "82", "--rate", "45", "--out", plan_file),
            )
        )
        mesh = json.loads(penstock("up", "--mesh", mesh_file, "--folder", folder, "--detach", "--json"))
        admin = mesh["admin"][0]
        try:
            show(admin)
            penstock("plan", "apply", plan_file, "--admin", admin)
            show(admin)
            penstock("plan", "rollback", "--admin", admin)
            show(admin)
        finally:
            penstock("down", "--folder", folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
