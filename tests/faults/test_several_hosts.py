"""Three hosts as docs/how-to/operations.md says, word for word, in network namespaces; then one of them is cut off."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, write_mesh_file
from tests.support.network_hosts import NetworkHost, network_hosts
from tests.support.present import present
from tests.support.simulated_text import ENDLESS, simulated_texts
from tests.support.streaming_client import prompts

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "how-to" / "operations.md"
PACE = {"overhead_ms": 250.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
STREAMS = 60
TOKENS = 150  # 37 s: longer than the partition, and a look at where the streams are
PARTITION_S = 30.0
SILENCE_S = 5.0
WAIT_S = 60.0
TRIES = 5
NOWHERE = "10.0.0.99"


def blocks() -> dict[str, str]:
    """The commands of the section on several hosts, by the comment that begins each block and says where they run."""
    section = present(re.search(r"^## Several hosts$(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL))[1]
    found = re.findall(r"^```\n# ([^\n]+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return dict(found)


@dataclass(frozen=True)
class Operator:
    """Runs commands on hosts, as someone with a shell on each would."""

    folder: Path
    stack: ExitStack

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}

    def start(self, host: NetworkHost, commands: str) -> None:
        """Start what commands start in the background; all of it ends with the stack."""
        log = self.stack.enter_context((self.folder / f"{host.address}.log").open("ab"))
        argv = host.command("bash", "-c", f"HOST={host.address}\n{blocks()[EACH]}{commands}wait")
        shell = subprocess.Popen(
            argv, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )
        self.stack.callback(shell.wait)
        self.stack.callback(os.killpg, shell.pid, signal.SIGKILL)

    def run(self, host: NetworkHost, commands: str) -> str:
        """What commands write."""
        argv = host.command("bash", "-ec", commands)
        done = subprocess.run(
            argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def status(self, host: NetworkHost) -> dict[str, Any] | None:
        """The command of the page, as JSON; None while nobody answers it."""
        command = present(re.search(r"^penstock status .*$", blocks()[ANYWHERE], re.MULTILINE))[0]
        argv = host.command("bash", "-c", f"{command} --json")
        done = subprocess.run(argv, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def until(self, host: NetworkHost, condition: Callable[[dict[str, list[str]]], bool]) -> None:
        """Wait for the states of instances by where they are."""
        end, seen = time.monotonic() + WAIT_S, dict[str, list[str]]()
        while time.monotonic() < end:
            if (status := self.status(host)) is not None:
                seen = states(status)
                if condition(seen):
                    return
            time.sleep(0.5)
        logs = "".join(log.read_text()[-3000:] for log in self.folder.glob("*.log"))
        raise TimeoutError(f"{seen}\n{logs}")

    def streams(self, client_at: NetworkHost, one_at: NetworkHost) -> subprocess.Popen[str]:
        """A client with STREAMS, of which some are at `one_at`, whose worker may be passed over on a busy machine."""
        argv = ["-m", "tests.support.streaming_client", "10.0.0.1:50051", "large", str(STREAMS), str(TOKENS)]
        for _ in range(TRIES):
            client = subprocess.Popen(
                client_at.command(sys.executable, *argv),
                cwd=ROOT,
                env=self.environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.stack.callback(client.wait)
            self.stack.callback(client.kill)
            assert present(client.stdout).readline() == "begun\n"
            instances = (self.status(client_at) or {"instances": []})["instances"]
            if any(one["running"] and one["address"].startswith(one_at.address) for one in instances):
                return client
            client.kill()
        raise AssertionError(f"no stream was at {one_at.address}")


EACH = "on each host, whose own address is HOST"
FIRST, OTHERS = "on 10.0.0.1", "on 10.0.0.2 and 10.0.0.3"
ANYWHERE = "on any of them"


def states(status: dict[str, Any]) -> dict[str, list[str]]:
    """The states of the workers and judges of each address."""
    found: dict[str, list[str]] = {}
    for instance in status["instances"]:
        if instance["role"] in ("worker", "judge"):
            found.setdefault(instance["address"].rpartition(":")[0], []).append(instance["state"])
    return found


READY = {"10.0.0.2": ["ready"] * 3, "10.0.0.3": ["ready"] * 3}


@contextmanager
def operator(folder: Path) -> Iterator[Operator]:
    with ExitStack() as stack:
        yield Operator(folder, stack)


@pytest.mark.timeout(600)
def test_three_hosts_serve_as_the_page_says_and_a_partition_costs_no_stream(tmp_path: Path) -> None:
    tiers: list[dict[str, Any]] = [
        {"name": "small", "model": "sim", "simulated": PACE | {"reply_tokens": 4}, "threshold": 50},
        {"name": "large", "model": "sim", "simulated": PACE},
    ]
    router = {"worker_silence_s": SILENCE_S}
    write_mesh_file(tmp_path, tiers, router=router).rename(tmp_path / "mesh.yaml")
    with network_hosts(3) as (one, two, three), operator(tmp_path) as shell:
        shell.start(one, blocks()[FIRST])
        for host in (two, three):
            shell.start(host, blocks()[OTHERS])
        shell.until(one, lambda seen: seen == READY)
        assert "large" in shell.run(two, blocks()[ANYWHERE])

        lost = f"export PENSTOCK_ADVERTISE_HOST={NOWHERE}\nPENSTOCK_TIER=large python -m penstock.worker_service &\n"
        shell.start(three, lost)
        shell.until(one, lambda seen: seen == READY | {NOWHERE: ["unreached"]})

        client = shell.streams(two, three)
        with three.cut_off():
            time.sleep(PARTITION_S)  # what is tested: that it lasts this long
        results = json.loads(client.communicate(timeout=WAIT_S)[0])
        shell.until(one, lambda seen: seen == READY | {NOWHERE: ["unreached"]})
    assert [r["error"] for r in results if r["error"]] == [], "lost"
    assert not any(r["doubled"] for r in results), "a token twice, or one missing"
    assert sum(r["failovers"] for r in results) > 0, "no stream was at the host that was cut off"
    texts = simulated_texts(dict.fromkeys(prompts(STREAMS), TOKENS))
    assert {r["prompt"]: r["text"] for r in results} == texts
