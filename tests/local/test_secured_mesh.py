"""A local mesh with API keys, TLS and its own Redis: it works by the command line, and no secret is written anywhere."""

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.local.runfile import read_run_file
from penstock.services.access import authority
from penstock.services.access.api_keys import KeyFile, new_key
from penstock.services.access.roles import CallerRole
from tests.conftest import write_mesh_file
from tests.support.cli import penstock, penstock_process

PROMPT = "a prompt that no file may have"


@pytest.mark.slow
def test_a_mesh_with_keys_and_certificates_runs_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers: list[dict[str, Any]] = [{"name": "small", "model": "s", "threshold": 100}, {"name": "large", "model": "l"}]
    access = {"keys": "keys.json", "tenants": [{"name": "acme"}]}
    file, folder = write_mesh_file(tmp_path, tiers, access=access, tls={"folder": "certs"}), tmp_path / "run"
    stored, key = new_key("acme", time.time())
    KeyFile(tmp_path / "keys.json").add(stored)
    authority.create(tmp_path / "certs", ["localhost", "127.0.0.1"], days=1)

    up = penstock_process("up", "--mesh", file, "--folder", folder, "--detach", "--json")
    assert up.returncode == 0, up.stderr
    try:
        running = read_run_file(folder)
        assert running is not None
        assert running.tls_folder == str(tmp_path / "certs")
        passwords = _redis_passwords(running.pid)
        assert set(passwords) == {role.value for role in CallerRole} - {"client", "admin"}

        monkeypatch.setenv("PENSTOCK_TLS_FOLDER", running.tls_folder)
        refused = penstock("ask", PROMPT, "--target", running.grpc[0])
        assert (refused.returncode, "an API key is needed" in refused.stderr) == (1, True)
        monkeypatch.setenv("PENSTOCK_API_KEY", key)
        answered = penstock("ask", PROMPT, "--target", running.grpc[0], "--max-tokens", 4, "--json")
        assert answered.returncode == 0, answered.stderr
        status = penstock("status", "--admin", running.admin[0], "--json")
        assert json.loads(status.stdout)["plan_revision"] == 1, status.stderr
        plan = penstock("plan", "show", "--admin", running.admin[0])
        assert plan.returncode == 0, plan.stderr
        monkeypatch.setenv("PENSTOCK_TLS_FOLDER", str(tmp_path))  # where there are no certificates
        refused = penstock("status", "--admin", running.admin[0])
        assert refused.returncode == 1
    finally:
        assert penstock_process("down", "--folder", folder).returncode == 0

    private = [line for line in (tmp_path / "certs" / "router.pem").read_text().splitlines() if len(line) == 64][:1]
    secrets = [*passwords.values(), key.split("-", 2)[2], PROMPT, *private]
    written = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {"up.log", "router-0.log", "users.acl"} <= {path.name for path in written}
    written[Path("--json")] = (up.stdout + up.stderr + status.stdout).encode()
    for path, data in written.items():
        for secret in secrets:
            assert secret.encode() not in data, path
    assert "redis://127.0.0.1:" in up.stdout


def _redis_passwords(pid: int) -> dict[str, str]:
    """The password of each role, from the environments of the services that `penstock up` with this process id started."""
    passwords = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            status = (process / "stat").read_text().rpartition(")")[2].split()
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(status[1]) != pid:
            continue
        for name, _, value in (entry.decode(errors="replace").partition("=") for entry in environment):
            if name == "PENSTOCK_REDIS_URL" and (parts := urlsplit(value)).username and parts.password:
                passwords[parts.username] = parts.password
    return passwords
