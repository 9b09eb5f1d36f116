"""The chart's pods really run, with certificates, keys and a user of Redis for each role: `make test-kube`."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import AsyncClient, Tls
from penstock.services.access import authority
from penstock.services.access.api_keys import KeyFile, new_key
from penstock.services.chart import values_of
from penstock.services.processes import free_port
from tests.compose.test_compose import BASES, Reader, check_streams, until
from tests.conftest import ROOT
from tests.kube.chart import RELEASE, Manifest, merged, rendered, value_file
from tests.kube.podman import Pods
from tests.support.containers import ComposeProject, Engine, NoEngineError, run, succeeds

pytestmark = [pytest.mark.kube, pytest.mark.timeout(3000)]

ROUTER, SMALL, LARGE, REDIS = (f"{RELEASE}-{name}" for name in ("router", "small", "large", "redis"))
OTHERS = tuple(f"{RELEASE}-{name}" for name in ("planner", "judge", "admin"))


def mesh_file(threshold: int) -> dict[str, Any]:
    engine = {"engine": "simulated", "simulated": {"overhead_ms": 5.0, "reply_tokens": 64}}
    return {
        "name": "kube",
        "tiers": [
            {"name": "small", "threshold": threshold, "workers": 2, **engine},
            {"name": "large", **engine},
        ],
        "access": {"keys": "keys.json", "tenants": [{"name": "acme", "ignore_eos": True}]},
    }


def objects_for(folder: Path, threshold: int) -> list[Manifest]:
    """The objects of the chart. Random passwords are those of the first rendering, as an upgrade keeps them."""
    path = folder / "mesh.yaml"
    path.write_text(yaml.safe_dump(mesh_file(threshold)))
    own = {"image": {"registry": "localhost/"}, "redis": {"image": BASES[1]}}  # by the names of the compose file
    return rendered(merged(values_of(path), value_file("certificates"), own))


class Mesh:
    """The running mesh. key: of a tenant."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.objects = folder, objects_for(folder, threshold=100)
        self.ports = [free_port() for _ in range(2)]
        authority.create(folder / "certs", ["127.0.0.1"], days=1)
        stored, self.key = new_key("acme", time.time())
        KeyFile(folder / "keys.json").add(stored)
        certificates = {path.name: path.read_text() for path in (folder / "certs").glob("*.pem")}
        secrets = {"mesh-certificates": certificates, "mesh-keys": {"keys.json": (folder / "keys.json").read_text()}}
        self.pods = Pods(folder, self.objects, secrets)

    def start(self) -> None:
        redis = self.pods.play(self.objects, REDIS)
        self.pods.wait_ready(self.objects, REDIS, redis)
        for workload, number in ((SMALL, 0), (SMALL, 1), (LARGE, 0), *((each, 0) for each in OTHERS)):
            self.pods.play(self.objects, workload, number)
        self.pods.play(self.objects, ROUTER, 0, self.ports[0])
        for workload, number in ((SMALL, 0), (SMALL, 1), (LARGE, 0), *((each, 0) for each in OTHERS[:2]), (ROUTER, 0)):
            self.pods.wait_ready(self.objects, workload, f"{workload}-{number}")

    def status(self) -> dict[str, Any]:
        status = json.loads(self.pods.exec(f"{RELEASE}-admin-0", "penstock", "status", "--json"))
        assert isinstance(status, dict)
        return status

    def workers(self, tier: str) -> list[str]:
        """The ready workers of a tier, by the names of their pods."""
        ready = [i for i in self.status()["instances"] if (i["tier"], i["state"]) == (tier, "ready")]
        return [i["instance_id"].removeprefix(f"worker-{tier}-").rpartition("-")[0] for i in ready]


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    if not succeeds("podman", "info"):
        pytest.skip("no podman here: the pods do not run")
    engine = Engine("podman", ())
    try:
        for base in BASES:
            engine.require(base)
    except NoEngineError as error:
        pytest.skip(f"no containers here: {error}")
    for image, arguments in ComposeProject(engine, ROOT, "unused", 0, 0).images().items():
        engine.build(image, ROOT, arguments)
    made = Mesh(tmp_path_factory.mktemp("kube"))
    try:
        await asyncio.to_thread(made.start)
        await until(lambda: len(made.workers("small")) == 2)
        yield made
    except BaseException:
        print(made.pods.logs())
        raise
    finally:
        made.pods.down()


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[AsyncClient]:
    targets = ",".join(f"127.0.0.1:{port}" for port in mesh.ports)
    tls = Tls(ca=mesh.folder / "certs" / "ca.pem")
    async with AsyncClient(targets, api_key=mesh.key, tls=tls, timeout_s=300) as made:
        yield made


async def test_a_request_climbs_the_cascade_and_administration_is_reached(mesh: Mesh, client: AsyncClient) -> None:
    reply = await client.generate("What is 12 + 30?", max_tokens=20)
    assert reply.tier == "large"
    assert {i["role"] for i in mesh.status()["instances"]} == {"router", "worker", "judge", "planner"}
    mesh.pods.exec(f"{RELEASE}-admin-0", "penstock", "plan", "set", "--threshold", "small=0")
    await until(lambda: mesh.status()["plan_revision"] == 2)
    assert (await client.generate("What is 12 + 30?", max_tokens=20)).tier == "small"


async def test_every_probe_of_a_running_mesh_succeeds(mesh: Mesh) -> None:
    for workload in (ROUTER, SMALL, LARGE, REDIS, *OTHERS[:2]):
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "tcpSocket" not in mesh_probe(mesh, workload, kind):
                assert mesh.pods.probe(mesh.objects, workload, f"{workload}-0", kind), (workload, kind)


def mesh_probe(mesh: Mesh, workload: str, kind: str) -> dict[str, Any]:
    (each,) = (
        o for o in mesh.objects if o["kind"] in ("Deployment", "StatefulSet") and o["metadata"]["name"] == workload
    )
    probe = each["spec"]["template"]["spec"]["containers"][0][kind]
    assert isinstance(probe, dict)
    return probe


async def test_a_pod_is_killed_under_streams(mesh: Mesh, client: AsyncClient) -> None:
    """No token is lost, none comes twice, every text is the same."""

    def kill(readers: list[Reader]) -> None:
        ((instance_id, _),) = Counter(reader.instance_id for reader in readers).most_common(1)
        pod = instance_id.removeprefix("worker-small-").rpartition("-")[0]
        run("podman", "kill", mesh.pods.container(pod))

    readers = await check_streams(client, "small", kill)
    assert sum(reader.instance_changes for reader in readers) > 0, "the pod computed no reply"
    for number in range(2):
        if not succeeds("podman", "exec", mesh.pods.container(f"{SMALL}-{number}"), "true"):
            run("podman", "start", mesh.pods.container(f"{SMALL}-{number}"))
    await until(lambda: len(mesh.workers("small")) == 2)


async def test_redis_restarts_with_its_volume_under_streams(mesh: Mesh, client: AsyncClient) -> None:
    before = mesh.status()["plan_revision"]

    def restart(_: list[Reader]) -> None:
        mesh.pods.stop(mesh.objects, REDIS, f"{REDIS}-0")
        mesh.pods.wait_ready(mesh.objects, REDIS, mesh.pods.play(mesh.objects, REDIS))

    await check_streams(client, "small", restart)
    await until(lambda: len(mesh.workers("small")) == 2)
    assert mesh.status()["plan_revision"] == before


async def test_a_changed_mesh_file_is_rolled_under_streams(mesh: Mesh, client: AsyncClient) -> None:
    """As a Deployment rolls: a new pod, its readiness, the old one's preStop and drain."""
    changed = objects_for(mesh.folder, threshold=40)

    def roll(_: list[Reader]) -> None:
        for workload, old, new, port in ((SMALL, 0, 2, 0), (SMALL, 1, 3, 0), (ROUTER, 0, 1, mesh.ports[1])):
            mesh.pods.wait_ready(changed, workload, mesh.pods.play(changed, workload, new, port))
            mesh.pods.stop(mesh.objects, workload, f"{workload}-{old}")
        mesh.pods.stop(mesh.objects, OTHERS[0], f"{OTHERS[0]}-0")
        mesh.pods.play(changed, OTHERS[0], 1)

    await check_streams(client, "small", roll)
    await until(lambda: sorted(mesh.workers("small")) == [f"{SMALL}-2", f"{SMALL}-3"])
    await until(lambda: mesh.status()["plan_revision"] > 2)
