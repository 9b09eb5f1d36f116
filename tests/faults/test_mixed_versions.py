"""Services of this version and of the previous one serve in one mesh, replaced one by one under load. Real processes.

The previous version is the commit that tests/compat/previous names.
"""

import asyncio
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_streams import StreamResult, grpc_stream
from penstock import AsyncClient, AsyncPlannerClient, UnavailableError
from penstock.placement.processes import MeshProcess, service_spec
from penstock.services.processes import Watcher, free_port
from tests.conftest import ROOT, write_mesh_file
from tests.support.services import RedisProcess
from tests.support.simulated_text import ENDLESS, simulated_texts

pytestmark = pytest.mark.slow

PREVIOUS = ROOT / "tests" / "compat" / "previous"
PACKAGES = ("penstock", "services", "router_service", "worker_service", "judge_service", "planner_service")
PARTS = ("planner", "judge", "worker-small", "worker-large", "worker-large", "router", "router")
"""In the order of their replacement: each role of one version serves beside all others of the other version."""
PACE = {"overhead_ms": 50.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": ENDLESS}
CLIENTS = 40
TOKENS = 40  # two seconds at each tier
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the previous version's code."""
    commit, folder = PREVIOUS.read_text().strip(), tmp_path_factory.mktemp("previous")
    archive = subprocess.run(["git", "archive", commit, *PACKAGES], cwd=ROOT, capture_output=True)
    if archive.returncode:
        pytest.skip(f"commit {commit} is not in the history here: `git fetch --unshallow` gets it")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="tar")
    script = "import penstock.services; print(penstock.services.__file__)"
    origin = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | code_of(folder), capture_output=True, text=True, check=True
    )
    assert origin.stdout.startswith(str(folder))
    return folder


def code_of(folder: Path) -> dict[str, str]:
    """Variables with which Python runs the code of a folder, and not that of the working directory."""
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


@dataclass
class MixedMesh:
    """Processes of a mesh, each of a version. parts: their kinds, by instance id, in the order of their start."""

    file: Path
    redis_url: str
    folder: Path
    router_ports: list[int]
    """Of the routers that will be started, in this order."""
    watcher: Watcher = field(default_factory=Watcher)
    parts: dict[str, str] = field(default_factory=dict)
    admin: dict[str, str] = field(default_factory=dict)
    """Administrative listeners of all parts that were ever started."""
    routers: int = 0

    async def start(self, kind: str, code: Path) -> None:
        name = f"{kind}-{len(self.admin)}"
        env = code_of(code) | {"PENSTOCK_INSTANCE_ID": name, "PENSTOCK_MESH_FILE": str(self.file)}
        env |= {"PENSTOCK_REDIS_URL": self.redis_url, "PENSTOCK_ADMIN_PORT": str(free_port())}
        role, _, tier = kind.partition("-")
        if tier:
            env["PENSTOCK_TIER"] = tier
        if role == "router":
            env["PENSTOCK_GRPC_PORT"] = str(self.router_ports[self.routers])
            self.routers += 1
        self.parts[name], self.admin[name] = kind, f"127.0.0.1:{env['PENSTOCK_ADMIN_PORT']}"
        await self.watcher.start(service_spec(MeshProcess(name, env), {}, self.folder / f"{name}.log"))

    async def stop(self, name: str) -> None:
        """As an operator does: with SIGTERM, so that it drains."""
        del self.parts[name]
        await self.watcher.stop(name)

    async def complete(self, plan_revision: int = 1) -> None:
        """Return when every router sees every part ready, and follows a plan of at least this revision."""
        for name in self.of("router"):
            async with AsyncClient(self.admin[name], admin=self.admin[name]) as client, asyncio.timeout(TIMEOUT_S):
                while not await self._sees_all(client, plan_revision):
                    await asyncio.sleep(0.1)

    async def _sees_all(self, router: AsyncClient, plan_revision: int) -> bool:
        try:
            status = await router.status()
        except UnavailableError:  # it has not started yet
            return False
        ready = {i.instance_id for i in status.instances if i.state == "ready"}
        return ready >= set(self.parts) and status.plan_revision >= plan_revision

    def of(self, kind: str) -> list[str]:
        return [name for name, other in self.parts.items() if other == kind]


@asynccontextmanager
async def mixed_mesh(file: Path, redis_url: str, folder: Path, code: Path) -> AsyncIterator[MixedMesh]:
    """A mesh of one version, complete."""
    mesh = MixedMesh(file, redis_url, folder, [free_port() for _ in range(3 * PARTS.count("router"))])
    try:
        for kind in PARTS:
            await mesh.start(kind, code)
        await mesh.complete()
        yield mesh
    finally:
        await mesh.watcher.stop_all()


@pytest.mark.timeout(900)
async def test_services_of_two_versions_serve_together_while_they_are_replaced(
    previous: Path, redis: RedisProcess, tmp_path: Path
) -> None:
    """From the previous version to this one and back: no stream is lost, doubled or wrong, and each planner publishes."""
    tiers: list[dict[str, Any]] = [
        {"name": "small", "model": "sim", "simulated": PACE, "threshold": 50},
        {"name": "large", "model": "sim", "simulated": PACE},
    ]
    file = write_mesh_file(tmp_path, tiers, router={"grpc_port": 0, "http_port": 0})
    prompts = [f"question {i}" for i in range(CLIENTS)]
    texts = simulated_texts(dict.fromkeys(prompts, TOKENS))
    results: list[StreamResult] = []
    ended = asyncio.Event()

    async def ask(prompt: str) -> None:
        while not ended.is_set():
            result = StreamResult(prompt)
            await stream(prompt, result)
            results.append(result)

    async with mixed_mesh(file, redis.url, tmp_path, previous) as mesh:
        addresses = [f"127.0.0.1:{port}" for port in mesh.router_ports]
        async with AsyncClient(addresses, timeout_s=TIMEOUT_S) as client, asyncio.TaskGroup() as tasks:
            stream = grpc_stream(client, max_tokens=TOKENS)
            for prompt in prompts:
                tasks.create_task(ask(prompt))
            for code in (ROOT, previous):
                for kind in PARTS:
                    old = mesh.of(kind)[0]
                    await mesh.start(kind, code)
                    await mesh.complete()
                    await mesh.stop(old)
                    if kind == "planner":
                        await mesh.complete(await publish_again(mesh))
                    served = len(results)
                    while len(results) < served + CLIENTS:
                        await asyncio.sleep(0.05)
            ended.set()
    assert [r.error for r in results if r.error] == [], "lost"
    assert not any(r.doubled for r in results), "a token twice, or one missing"
    assert all(r.text == texts[r.prompt] for r in results)
    assert {r.tier for r in results} >= {"large"}


async def publish_again(mesh: MixedMesh) -> int:
    """Have the planner publish its plan as a new one; return the revision."""
    async with AsyncPlannerClient(mesh.admin[mesh.of("planner")[0]]) as planner:
        return (await planner.set_plan(await planner.get_plan())).revision
