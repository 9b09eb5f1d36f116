"""The Helm chart, for ten value files: strict schemas, and policies that every pod keeps. `make test-kube`."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import HelmError
from kubernetes_validate import validate

from penstock.services.access.roles import PERMISSIONS, SERVICES, CallerRole
from penstock.services.chart import values_of
from tests.conftest import ROOT
from tests.kube.chart import RELEASE, Manifest, merged, pods, rendered, value_file
from tests.planner.test_render import plan_file, typed_plan_file
from tests.planner.test_render import values_of as planned_values

pytestmark = pytest.mark.kube

KUBERNETES = "1.37"
CUSTOM = ("Certificate", "ServiceMonitor", "HTTPRoute", "ScaledObject")
NPM = ROOT / ".penstock" / "kube" / "node_modules"
NAMES = sorted(path.stem for path in (Path(__file__).parent / "values").glob("*.yaml"))


@pytest.fixture(scope="module", params=NAMES)
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """The objects for one of the value files, with the shipped mesh or a plan for GPUs."""
    if request.param == "gpu-types":
        generated = planned_values(typed_plan_file(tmp_path_factory.mktemp("plan"), ("spot", "reserved")))
    else:
        generated = values_of(ROOT / ("deploy/mesh-gpu.yaml" if request.param == "hub" else "mesh.yaml"))
    return rendered(merged(generated, value_file(request.param)))


def test_there_are_ten_value_files() -> None:
    assert len(NAMES) == 10


def test_kubernetes_takes_every_object(manifests: list[Manifest]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(names)) == len(names)
    for each in manifests:
        if each["kind"] not in CUSTOM:
            validate(each, KUBERNETES, strict=True)
    custom = [each for each in manifests if each["kind"] in CUSTOM]
    if custom:
        assert shutil.which("node"), "custom resources are checked with npm packages: install node"
        script = Path(__file__).parent / "custom_resources.js"
        subprocess.run(["node", script, NPM], input=json.dumps(custom), text=True, check=True)


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def mebibytes(quantity: str) -> int:
    return int(quantity[:-2]) * {"Mi": 1, "Gi": 1024}[quantity[-2:]]


def test_every_container_is_limited_probed_and_restricted(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert len(spec["topologySpreadConstraints"]) == 2
        for container in containers(pod):
            where = (name, container["name"])
            assert ":" in container["image"], where
            assert not container["image"].endswith(":latest"), where
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), where
            asked, limit = (container["resources"][part]["memory"] for part in ("requests", "limits"))
            assert mebibytes(asked) <= mebibytes(limit), where
            assert "livenessProbe" in container, where
            security = container["securityContext"]
            assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (False, {"drop": ["ALL"]})
            if container["name"] != "sglang":  # whose image runs as root
                assert security["runAsNonRoot"], where
                assert security["readOnlyRootFilesystem"], where
                assert security["runAsUser"] > 0, where
            if container["name"] in ("router", "worker", "judge", "planner", "redis"):
                assert {"startupProbe", "readinessProbe"} <= set(container), where


def test_what_pods_refer_to_exists_or_is_the_operators(manifests: list[Manifest]) -> None:
    """Selectors match pods, ports have their names, volumes are defined, and Secrets come from the chart or the values."""
    of_kind: dict[str, dict[str, Manifest]] = {}
    for each in manifests:
        of_kind.setdefault(each["kind"], {})[each["metadata"]["name"]] = each
    labels = [pod["metadata"]["labels"] for pod in pods(manifests).values()]
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for name, each in of_kind.get(kind, {}).items():
            selector = each["spec"].get("podSelector", each["spec"].get("selector"))
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= label.items() for label in labels), (kind, name)
    for name, each in {**of_kind["Deployment"], **of_kind.get("StatefulSet", {})}.items():
        spec, pod = each["spec"], each["spec"]["template"]
        matching = [label for label in labels if spec["selector"]["matchLabels"].items() <= label.items()]
        assert matching == [pod["metadata"]["labels"]], f"{name} has the pods of another workload"
        assert pod["spec"]["serviceAccountName"] in of_kind["ServiceAccount"]
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
        for container in containers(pod):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= {*volumes, *claims}, name
            for variable in container.get("env", ()):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference and reference["name"] in of_kind.get("Secret", ()):
                    assert reference["key"] in of_kind["Secret"][reference["name"]]["stringData"]
        if name != f"{RELEASE}-redis" and not name.endswith("admin") and "mesh" in volumes:
            assert pod["metadata"]["annotations"]["checksum/mesh"]


def test_two_planners_are_rolled_and_evicted_one_by_one(tmp_path: Path) -> None:
    """As many as the mesh file has: one leads, and the other is there to take over."""
    mesh = yaml.safe_load((ROOT / "mesh.yaml").read_text())
    (tmp_path / "mesh.yaml").write_text(yaml.safe_dump(mesh | {"planner": {"replicas": 2}}))
    objects = rendered(merged(values_of(tmp_path / "mesh.yaml"), value_file("open")))
    named = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in objects if "spec" in each}
    planners = named["Deployment", f"{RELEASE}-planner"]
    assert planners["replicas"] == 2
    assert planners["strategy"] == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    budget = named["PodDisruptionBudget", f"{RELEASE}-planner"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"] == planners["selector"]["matchLabels"]


def test_network_policies_are_the_table_of_roles() -> None:
    objects = rendered(merged(values_of(ROOT / "mesh.yaml"), value_file("certificates")))
    policies = {
        each["metadata"]["name"]: each["spec"]["ingress"] for each in objects if each["kind"] == "NetworkPolicy"
    }
    component = "app.kubernetes.io/component"

    def callers(role: str, port: str) -> set[str]:
        rules = (rule for rule in policies[f"{RELEASE}-{role}"] if {"port": port} in rule["ports"])
        return {peer["podSelector"]["matchLabels"][component] for rule in rules for peer in rule["from"]}

    for service in ("worker", "judge", "planner"):
        rpcs = [roles for rpc, roles in PERMISSIONS.items() if rpc.startswith(f"/penstock.{service}.v1.")]
        allowed = frozenset[CallerRole]().union(*rpcs) & SERVICES
        assert callers(service, "grpc") == {role.value for role in allowed}, service
        assert callers(service, "admin") == {"admin"}
    assert callers("redis", "redis") == {role.value for role in SERVICES}
    clients = [rule for rule in policies[f"{RELEASE}-router"] if {"port": "http"} in rule["ports"]]
    assert [list(peer) for rule in clients for peer in rule["from"]] == [["namespaceSelector"]]


@pytest.mark.parametrize(("kind", "least"), [("hpa", "minReplicas"), ("keda", "minReplicaCount")])
def test_an_autoscaler_has_the_counts_of_tiers_of_one_group(tmp_path: Path, kind: str, least: str) -> None:
    """It follows the planner's metric by tier, and the chart then sets no count; a tier of two shapes keeps the chart's."""
    shapes: Any = ([(4, 1, 1)], [(2, 4, 1)], [(1, 4, 1), (1, 8, 1)])
    values = merged(planned_values(plan_file(tmp_path, shapes, nodes=4)), value_file("open"))
    objects = rendered(merged(values, {"autoscaling": {"kind": kind}}))
    scalers = [each for each in objects if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    assert [scaler["spec"]["maxReplicas" if kind == "hpa" else "maxReplicaCount"] for scaler in scalers] == [64, 64]
    assert {scaler["spec"][least] for scaler in scalers} == {1 if kind == "hpa" else 0}
    scaled = {scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers}
    workers = [each for each in objects if each["kind"] == "Deployment" and "worker" in str(each["spec"]["selector"])]
    assert {each["metadata"]["name"] for each in workers if "replicas" not in each["spec"]} == scaled
    for scaler, tier in zip(scalers, ("small", "medium"), strict=True):
        assert tier in json.dumps(scaler["spec"])
        for trigger in scaler["spec"].get("triggers", ()):
            assert trigger["metadata"]["ignoreNullValues"] == "false", "no metric is taken for a count of zero"


def test_replicas_have_their_gpus_and_nodes(tmp_path: Path) -> None:
    """All GPUs of the plan are asked for, on nodes of their type; a server over three nodes finds itself by name."""
    shapes: Any = ([(4, 1, 1)], [(2, 4, 1)], [(1, 4, 3), (1, 8, 1)])
    objects = rendered(merged(planned_values(plan_file(tmp_path, shapes, nodes=4)), value_file("open")))
    asked = 0
    for each in objects:
        for container in containers(each["spec"]["template"]) if each["kind"] in ("Deployment", "StatefulSet") else ():
            asked += container["resources"]["limits"].get("nvidia.com/gpu", 0) * each["spec"]["replicas"]
    assert asked == 4 + 8 + 12 + 8
    name = f"{RELEASE}-large-tp4pp3-0"
    (nodes,) = (each for each in objects if each["kind"] == "StatefulSet" and each["metadata"]["name"] == name)
    (server,) = nodes["spec"]["template"]["spec"]["containers"]
    assert (nodes["spec"]["replicas"], nodes["spec"]["serviceName"]) == (3, name)
    assert server["command"][-6:] == [
        "--nnodes",
        "3",
        "--dist-init-addr",
        f"{name}-0.{name}:20000",
        "--node-rank",
        "$(NODE_RANK)",
    ]
    assert any(each["kind"] == "Service" and each["metadata"]["name"] == name for each in objects)
    (worker,) = (pod for workload, pod in pods(objects).items() if workload == f"{name}-worker")
    variables = {each["name"]: each.get("value") for each in worker["spec"]["containers"][0]["env"]}
    assert variables["PENSTOCK_SGLANG_ENDPOINT"] == f"http://{name}-0.{name}:30000"
    assert "initContainers" not in worker["spec"]
    typed = planned_values(typed_plan_file(tmp_path, ("spot", "reserved")))
    chosen = {
        name: pod["spec"].get("nodeSelector")
        for name, pod in pods(rendered(merged(typed, value_file("gpu-types")))).items()
    }
    assert chosen[f"{RELEASE}-small-tp1pp1-spot"] == {"penstock/gpu-type": "spot"}
    assert chosen[f"{RELEASE}-large-tp4pp1-reserved"] == {"cloud.example/pool": "reserved-h100"}
    assert chosen[f"{RELEASE}-router"] is None


def test_a_changed_mesh_file_rolls_the_pods_that_read_it() -> None:
    values = merged(values_of(ROOT / "mesh.yaml"), value_file("open"))
    before, after = (pods(rendered(values | {"mesh": values["mesh"] + end})) for end in ("", "# edited\n"))
    same = {name for name in before if before[name]["metadata"] == after[name]["metadata"]}
    assert same == {f"{RELEASE}-redis"}


def test_redis_is_rolled_when_its_users_have_other_rules() -> None:
    """It reads them at its start."""
    values = merged(values_of(ROOT / "mesh.yaml"), value_file("open"))
    redis = [pods(rendered(values | {"meshName": name}))[f"{RELEASE}-redis"]["metadata"] for name in ("a", "a", "b")]
    assert redis[0] == redis[1] != redis[2]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"access": {}}, "access.open: true"),
        ({"access": {"opne": True}}, "opne"),
        ({"models": {"source": "disk"}}, "models/source"),
        ({"models": {"source": "claim"}}, "models.claim.name"),
        ({"image": {"tag": "latest"}}, "image/tag"),
        ({"redis": {"bundled": False}}, "redis.secret"),
        ({"mesh": ""}, "mesh"),
        ({"httpRoute": {"enabled": True}}, "httpRoute/parentRefs"),
        ({"workers": [{"name": "Small", "tier": "small", "replicas": 1}]}, "workers/0/name"),
        ({"workers": [{"name": "x" * 60, "tier": "small", "replicas": 1}]}, "longer than 52"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, Any], names: str) -> None:
    generated = {"mesh": yaml.safe_dump({"tiers": []}), "meshName": "penstock", "workers": []}
    with pytest.raises(HelmError) as refused:
        rendered(generated | {"access": {"open": True}} | values)
    assert names in str(refused.value)
