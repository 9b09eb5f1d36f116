"""The unit of systemd: what systemd itself says of it, and that it agrees with the services that it runs."""

import configparser
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.placement.processes import STOP_S
from penstock.services.domain.instances import Role
from penstock.services.processes import UNUSABLE_SETTINGS
from penstock.services.settings import ServiceSettings
from tests.conftest import ROOT

UNIT = ROOT / "deploy" / "systemd" / "penstock@.service"
PYTHON = "/opt/penstock/bin/python"


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_it_runs_the_services_and_stops_them_as_they_drain() -> None:
    command = service()["ExecStart"]
    assert re.fullmatch(rf"{PYTHON} -m penstock\.\${{ROLE}}_service", command)
    for role in Role:
        assert importlib.util.find_spec(command.split()[-1].replace("${ROLE}", role.value)) is not None
    assert int(service()["RestartPreventExitStatus"]) == UNUSABLE_SETTINGS
    assert float(service()["TimeoutStopSec"]) == STOP_S > ServiceSettings.load().drain_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path) -> None:
    unit = tmp_path / "penstock@.service"
    unit.write_text(UNIT.read_text().replace(PYTHON, sys.executable))
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
