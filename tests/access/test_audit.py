"""The audit of dependencies fails for known vulnerabilities, and only for them."""

import json

import pytest

from scripts.audit_dependencies import verdict


def test_a_known_vulnerability_is_a_failure_with_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    vulnerable = {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
    report = {"dependencies": [vulnerable, {"name": "b", "version": "3", "vulns": []}]}
    assert verdict(json.dumps(report), "") == 1
    assert "a 1: PYSEC-1, fixed in 2" in capsys.readouterr().out


def test_sound_dependencies_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(json.dumps({"dependencies": [{"name": "b", "version": "3", "vulns": []}]}), "") == 0
    assert "1 dependencies, 0 known vulnerabilities" in capsys.readouterr().out


@pytest.mark.parametrize("output", ["", "[]", "{}", "no JSON"])
def test_an_audit_that_could_not_run_says_so_and_passes(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(output, "Traceback\nConnectionError: no route") == 0
    assert "not audited: ConnectionError: no route" in capsys.readouterr().out
