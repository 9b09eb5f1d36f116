"""Run the core's tests in a copy of the source tree without extensions: `python -m scripts.extensions [NAME...]`.

Without names, all are removed but for those that the core's tests serve with. What an extension consists of follows from
its entry point: a module, or the folder that its module `extension` is in.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.services.extensions.lookup import DRAFTERS, ENGINES, SCORERS, entry_points_of

ROOT = Path(__file__).resolve().parent.parent
GROUPS = (ENGINES, SCORERS, DRAFTERS)
KEPT = ("simulated", "confidence")
FURTHER = {"chains": ("worker_service/engine/draft_model.py", "worker_service/speculation/adaptive.py")}
COPIED = (
    "pyproject.toml",
    "penstock",
    "services",
    "router_service",
    "worker_service",
    "planner_service",
    "judge_service",
    "tests",
)
CORE_TESTS = (
    "tests/router/test_cascade.py",
    "tests/router/test_cascade_generation.py",
    "tests/router/test_generation.py",
    "tests/router/test_answer_batching.py",
    "tests/worker/test_batching.py",
    "tests/worker/test_core_laws.py",
)
LOAD_OTHERS = """
from penstock.services.extensions.engines import EngineOptions
from penstock.services.extensions.lookup import ENGINES, SCORERS, entry_points_of, extension
from penstock.services.extensions.scorers import ScorerOptions
for group, kind in ((ENGINES, EngineOptions), (SCORERS, ScorerOptions)):
    for name in entry_points_of(group):
        extension(group, name, kind, name)
"""


def removable() -> list[str]:
    """The names of the extensions that the core does without."""
    return sorted({name for group in GROUPS for name in entry_points_of(group)} - {*KEPT})


def paths_of(name: str) -> set[Path]:
    """What an extension consists of: folders and modules of the source tree."""
    point = {key: point for group in GROUPS for key, point in entry_points_of(group).items()}[name]
    module = ROOT.joinpath(*point.module.split(".")[1:])
    own = module.parent if module.name == "extension" else module.with_suffix(".py")
    return {own, *(ROOT / path for path in FURTHER.get(name, ()))}


def copy_without(names: list[str], into: Path) -> None:
    """Copy the source tree without these extensions and their entry points. What is not code is linked."""
    removed = {path for name in names for path in paths_of(name)}

    def left_out(folder: str, entries: list[str]) -> list[str]:
        return [each for each in entries if Path(folder, each) in removed or each == "__pycache__"]

    for entry in ROOT.iterdir():
        if entry.name in COPIED and entry.is_dir():
            shutil.copytree(entry, into / entry.name, symlinks=True, ignore=left_out)
        elif entry.name not in COPIED and not entry.name.startswith("."):
            (into / entry.name).symlink_to(entry)
    lines = (ROOT / "pyproject.toml").read_text().splitlines(keepends=True)
    rest = [line for line in lines if not (line.partition(" = ")[0] in names and ":" in line)]
    (into / "pyproject.toml").write_text("".join(rest))


def run_without(names: list[str], *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Python in a copy without these extensions."""
    with tempfile.TemporaryDirectory() as folder:
        copy_without(names, Path(folder))
        environment = os.environ | {"PYTHONPATH": folder}
        return subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )


def problem_without(names: list[str]) -> str:
    """What is wrong without these extensions: another one cannot be loaded, or a test of the core fails; empty if nothing."""
    loaded = run_without(names, "-c", LOAD_OTHERS)
    if loaded.returncode:
        return loaded.stderr
    tests = run_without(names, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE_TESTS)
    return tests.stdout if tests.returncode else ""


def main() -> None:
    names = sys.argv[1:] or removable()
    if problem := problem_without(names):
        sys.exit(f"without {', '.join(names)}:\n{problem}")
    print(f"the core's tests pass without {', '.join(names)}")


if __name__ == "__main__":
    main()
