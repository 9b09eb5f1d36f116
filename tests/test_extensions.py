"""The core runs without extensions, and each of them without the others."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.services.extensions.engines import EngineOptions
from penstock.services.extensions.lookup import ENGINES, SCORERS, entry_points_of, extension
from penstock.services.extensions.scorers import ScorerOptions
from scripts.extensions import LOAD_OTHERS, problem_without, removable, run_without
from tests.conftest import FAMILY, ROOT

HEAVY = ("aiohttp", "grpc", "numpy", "tokenizers", "torch", "transformers")


def test_reading_options_imports_nothing_heavy() -> None:
    """`penstock check` reads those of all engines and scorers, with the extra `service` alone."""
    code = f"{LOAD_OTHERS}\nimport sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.slow
def test_the_core_runs_without_any_extension() -> None:
    assert problem_without(removable()) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", removable())
def test_no_extension_needs_another(name: str) -> None:
    done = run_without([name], "-c", LOAD_OTHERS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_torch_engine_runs_without_models_that_draft(tmp_path: Path) -> None:
    """A tier that has some is refused then, by name."""
    done = run_without(
        ["chains"], "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/worker/test_failing_requests.py"
    )
    assert done.returncode == 0, done.stdout
    file, small = tmp_path / "mesh.yaml", {"name": "small", "model": str(FAMILY / "small"), "threshold": 50}
    large = {"name": "large", "model": str(FAMILY / "large"), "speculation": "auto"}
    file.write_text(yaml.safe_dump({"tiers": [small, large]}))
    checked = run_without(["chains"], "-m", "penstock.cli.main", "check", str(file))
    assert "tiers[1].speculation.drafters: nothing that lets models draft is installed" in checked.stderr


def test_all_are_of_the_interface() -> None:
    for group, kind in ((ENGINES, EngineOptions), (SCORERS, ScorerOptions)):
        for name in entry_points_of(group):
            options = extension(group, name, kind, name)
            assert options.__doc__
            assert all(field.description for field in options.model_fields.values()), name
