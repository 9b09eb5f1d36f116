"""Compiled code is used again only while everything that it contains is the same, and compiling is announced."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.services import compilation

DOUBLE = "from penstock.services.compilation import compiled\nfrom penstock.services.factors import FACTOR\n\n"
DOUBLE += "@compiled()\ndef double(x: int) -> int:\n    return FACTOR * x\n"
CALLER = "from penstock.services.compilation import compiled\nfrom penstock.services.double import double\n\n"
CALLER += "@compiled()\ndef caller(x: int) -> int:\n    return double(double(x))\n"
FACTORS = "from penstock.services import names\nFACTOR = 2\n"
MODULES = {"__init__": "", "double": DOUBLE, "caller": CALLER, "factors": FACTORS, "names": ""}


@pytest.fixture
def services(tmp_path: Path) -> Path:
    """A package of that name, with a function that inlines another module's."""
    folder = tmp_path / "penstock" / "services"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "compilation.py").write_text(Path(compilation.__file__).read_text())
    return folder


def test_the_cache_is_void_after_an_edit_of_what_is_inlined(services: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function or a constant of another module counts as the module's own; what compiled code does not contain does not."""
    monkeypatch.setattr(compilation, "_PACKAGE", services.parent)
    folders = [compilation.folder_of.__wrapped__(services / "caller.py")]
    for edited, changes in (("double", True), ("factors", True), ("caller", True), ("names", False)):
        with (services / f"{edited}.py").open("a") as file:
            file.write("\n# an edit\n")
        folders.append(compilation.folder_of.__wrapped__(services / "caller.py"))
        assert (folders[-1] != folders[-2]) == changes, edited


@pytest.mark.slow
def test_compiling_is_announced_once_and_an_edit_is_seen(services: Path) -> None:
    def run() -> tuple[str, str]:
        script = "from penstock.services.caller import caller; print(caller(3))"
        env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
        command, cwd = [sys.executable, "-c", script], services.parent.parent  # where Python looks first
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip(), done.stderr

    printed, message = run()
    assert printed == "12"
    assert message.count("\n") == 1
    assert "s of CPU time, once per installation" in message
    assert run() == ("12", "")
    (services / "factors.py").write_text("FACTOR = 3\n")
    assert run()[0] == "27"
    assert len([*(services / "__pycache__").glob("caller-*")]) == 1, "the old code is removed"
