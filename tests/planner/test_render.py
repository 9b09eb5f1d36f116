"""Manifests of a plan: every GPU is used once, every flag says what was planned, and the formats' own tools accept them."""

import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock.cli.main import app
from services.mesh_file import load_mesh_file
from services.mesh_schema import MeshFile
from tests.conftest import ROOT

SHAPES: tuple[list[tuple[int, int, int]], ...] = ([(2, 1, 1), (1, 2, 1)], [], [(1, 4, 1)])  # (count, tp, pp) by tier


def plan_file(folder: Path, shapes: Any, nodes: int = 1, models: str = "deepseek-cascade.yaml") -> Path:
    cluster = folder / "cluster.yaml"
    cluster.write_text(yaml.safe_dump({"gpu": "h100", "nodes": nodes, "gpus_per_node": 8}))
    inputs = dict.fromkeys(("quality", "trace", "gpus", "seed", "rate", "requests", "lengths"))
    named = yaml.safe_load((ROOT / "examples" / models).read_text())["tiers"]
    tiers = [
        {"name": tier["name"], "replicas": [{"count": c, "tp": t, "pp": p} for c, t, p in parts]}
        for tier, parts in zip(named, shapes, strict=True)
    ]
    path = folder / "plan.json"
    content = {
        "inputs": inputs | {"cluster": str(cluster), "models": str(ROOT / "examples" / models)},
        "thresholds": [72.5, None],
        "tiers": tiers,
        "dispatch": "capacity",
    }
    path.write_text(json.dumps(content))
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def flags(arguments: list[str]) -> dict[str, str]:
    return {a: b for a, b in itertools.pairwise(arguments) if a.startswith("--") and not b.startswith("--")}


def test_a_compose_file_for_replicas_of_unlike_shapes(tmp_path: Path) -> None:
    done = run("plan", "render", plan_file(tmp_path, SHAPES), "--to", "compose")
    assert done.exit_code == 0, done.output
    path = tmp_path / "plan.compose.yaml"
    services = yaml.safe_load(path.read_text())["services"]
    servers = {name: s for name, s in services.items() if name.startswith("sglang")}
    names = ("small-tp1pp1-0", "small-tp1pp1-1", "small-tp2pp1-0", "large-tp4pp1-0")
    assert list(servers) == [f"sglang-{name}" for name in names]
    ids = [
        id_
        for s in servers.values()
        for d in s["deploy"]["resources"]["reservations"]["devices"]
        for id_ in d["device_ids"]
    ]
    assert ids == [str(i) for i in range(8)]
    told = flags(servers["sglang-large-tp4pp1-0"]["command"])
    assert (told["--tp-size"], told["--pp-size"], told["--chunked-prefill-size"]) == ("4", "1", "2048")
    assert float(told["--mem-fraction-static"]) == pytest.approx(0.92 - 1 / 80, abs=0.002)
    assert (told["--max-running-requests"], told["--page-size"]) == ("256", "16")
    worker = services["worker-small-tp2pp1-0"]
    assert worker["environment"]["PENSTOCK_SGLANG_ENDPOINT"] == "http://sglang-small-tp2pp1-0:30000"
    assert worker["environment"]["PENSTOCK_TIER"] == "small"
    mesh = load_mesh_file(tmp_path / "plan.mesh.yaml")
    assert [(t.workers, t.threshold) for t in mesh.tiers] == [(3, 72.5), (0, 100), (1, None)]
    tool = shutil.which("docker-compose")
    if tool is None:
        pytest.skip("docker-compose is not installed here: the schema is not checked")
    found = subprocess.run([tool, "-f", path, "config", "--quiet"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_servers_divide_experts_and_attention_as_planned(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, ([], [], [(1, 8, 1)]))
    content = json.loads(plan.read_text())
    content["tiers"][2]["replicas"][0] |= {"ep": 8, "attn_dp": 8}
    plan.write_text(json.dumps(content))
    assert run("plan", "render", plan, "--to", "compose").exit_code == 0
    services = yaml.safe_load((tmp_path / "plan.compose.yaml").read_text())["services"]
    command = flags(services["sglang-large-tp8pp1ep8attndp8-0"]["command"])
    named = ("--tp-size", "--ep-size", "--attn-dp-size", "--moe-a2a-backend", "--max-running-requests")
    assert [command[name] for name in named] == ["8", "8", "8", "deepep", "256"]


def test_compose_is_for_one_machine(tmp_path: Path) -> None:
    done = run("plan", "render", plan_file(tmp_path, ([(12, 1, 1)], [], []), nodes=2), "--to", "compose")
    assert done.exit_code == 2
    assert "the plan needs 12 GPUs, a node has 8; kubernetes" in " ".join(done.output.split())
    assert not (tmp_path / "plan.compose.yaml").exists()
    assert run("plan", "render", tmp_path / "plan.json", "--to", "nomad").exit_code == 2


def test_kubernetes_objects_hold_together(tmp_path: Path) -> None:
    """CASCADIA's row (90, 1): its large tier has replicas of 8 and of 12 GPUs, the latter over three nodes."""
    shapes = ([(4, 1, 1)], [(2, 4, 1)], [(1, 4, 3), (1, 8, 1)])
    done = run("plan", "render", plan_file(tmp_path, shapes, nodes=4), "--to", "kubernetes")
    assert done.exit_code == 0, done.output
    objects = list(yaml.safe_load_all((tmp_path / "plan.kubernetes.yaml").read_text()))
    names = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names)
    gpus = 0
    services = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "Service"}
    pods = {}
    for o in objects:
        if o["kind"] not in ("Deployment", "StatefulSet"):
            continue
        spec, pod = o["spec"], o["spec"]["template"]
        name = o["metadata"]["name"]
        assert len(name) <= 52  # a pod's name adds to it
        assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        pods[name] = pod["metadata"]["labels"]
        volumes = {v["name"] for v in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert {m["name"] for m in container.get("volumeMounts", ())} <= volumes
            if container["name"] == "router":  # the routes that the router serves, at a port that it has
                probes = [container[kind]["httpGet"] for kind in ("readinessProbe", "livenessProbe")]
                assert [probe["path"] for probe in probes] == ["/readyz", "/livez"]
                assert {probe["port"] for probe in probes} < {port["containerPort"] for port in container["ports"]}
            elif container["name"] in ("worker", "judge", "planner"):
                assert container["readinessProbe"]["grpc"] == {"port": 50051}
            wanted = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
            gpus += wanted * spec["replicas"]
            if container["name"] == "sglang":
                told = flags(container["args"])
                nodes = int(told.get("--nnodes", 1))
                assert int(told["--tp-size"]) * int(told["--pp-size"]) == wanted * nodes
                if nodes > 1:
                    head, port = told["--dist-init-addr"].split(":")
                    assert head == f"{name}-0.{spec['serviceName']}"
                    assert int(port) in [p["port"] for p in services[spec["serviceName"]]["ports"]]
                    assert spec["replicas"] == nodes == 3
                    assert told["--node-rank"] == f"$({container['env'][0]['name']})"
    assert gpus == 4 * 1 + 2 * 4 + 12 + 8
    for name, spec in services.items():
        if "statefulset.kubernetes.io/pod-name" not in spec["selector"]:
            assert any(spec["selector"].items() <= labels.items() for labels in pods.values()), name
    config = next(o for o in objects if o["kind"] == "ConfigMap")
    file = tmp_path / "mesh.yaml"
    file.write_text(config["data"]["mesh.yaml"])
    mesh = load_mesh_file(file)
    assert [t.workers for t in mesh.tiers] == [4, 2, 2]
    hosts = {t.sglang.endpoint.removeprefix("http://").partition(":")[0] for t in mesh.tiers}
    assert hosts <= set(services)


def state_judge(plan: Path, judge: dict[str, Any]) -> None:
    """State what judges in a models file of the plan's own."""
    content = json.loads(plan.read_text())
    models = yaml.safe_load(Path(content["inputs"]["models"]).read_text())
    own = plan.parent / "models.yaml"
    own.write_text(yaml.safe_dump(models | {"judge": judge}))
    content["inputs"]["models"] = str(own)
    plan.write_text(json.dumps(content))


@pytest.mark.parametrize("to", ["compose", "kubernetes"])
def test_all_servers_of_a_tier_share_its_grading(tmp_path: Path, to: str) -> None:
    """The judge asks the tier's workers, as many requests at once as they take together; no server has an address of its own
    in the judge's settings. A stated tier grades, else the largest that is used."""
    plan = plan_file(tmp_path, ([(4, 1, 1)], [(2, 1, 1)], []))
    for judge, tier, workers in ((None, "medium", 2), ({"tier": "small", "reply_tokens": 104}, "small", 4)):
        if judge is not None:
            state_judge(plan, judge)
        mesh = rendered_mesh(plan, to)
        (scorer,) = mesh.judge.scorers
        assert (scorer.kind, scorer.tier, scorer.endpoint) == ("llm", tier, "")
        assert scorer.concurrency == workers * mesh.tier(tier).max_running * scorer.tier_share
        assert scorer.thinking_tokens == (100 if judge else 0)
    state_judge(plan, {"tier": "large"})
    refused = run("plan", "render", plan, "--to", to)
    assert refused.exit_code == 2
    assert "judge.tier: the plan has no replicas of large" in " ".join(refused.output.split())


def rendered_mesh(plan: Path, to: str) -> MeshFile:
    """The mesh file of a plan's manifests."""
    done = run("plan", "render", plan, "--to", to)
    assert done.exit_code == 0, done.output
    if to == "compose":
        return load_mesh_file(plan.with_suffix(".mesh.yaml"))
    objects = yaml.safe_load_all(plan.with_suffix(".kubernetes.yaml").read_text())
    file = plan.parent / "mesh.yaml"
    file.write_text(next(o for o in objects if o["kind"] == "ConfigMap")["data"]["mesh.yaml"])
    return load_mesh_file(file)


def test_a_judge_model_has_its_processes(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, SHAPES)
    state_judge(plan, {"model": "grader", "replicas": 3, "token_s": 1e-5, "max_batch": 16, "max_batch_tokens": 8192})
    for to in ("compose", "kubernetes"):
        judge = rendered_mesh(plan, to).judge
        (scorer,) = judge.scorers
        assert (scorer.kind, scorer.model, judge.default_scorer) == ("judge-model", "/models/grader", scorer.name)
        assert (judge.replicas, judge.max_batch, judge.max_batch_tokens) == (3, 16, 8192)
    services = yaml.safe_load((tmp_path / "plan.compose.yaml").read_text())["services"]
    assert services["judge"]["deploy"] == {"replicas": 3}
    objects = yaml.safe_load_all((tmp_path / "plan.kubernetes.yaml").read_text())
    (deployment,) = (o for o in objects if o["kind"] == "Deployment" and o["metadata"]["name"] == "judge")
    assert deployment["spec"]["replicas"] == 3


def typed_plan_file(folder: Path, gpus: tuple[str, str]) -> Path:
    path = plan_file(folder, SHAPES)
    types = [{"name": name, "gpu": "h100", "nodes": 1, "gpus_per_node": 8} for name in ("reserved", "spot")]
    (folder / "cluster.yaml").write_text(yaml.safe_dump({"types": types}))
    content = json.loads(path.read_text())
    for tier, gpu in zip((content["tiers"][0], content["tiers"][2]), gpus, strict=True):
        tier["replicas"] = [group | {"gpu": gpu} for group in tier["replicas"]]
    path.write_text(json.dumps(content))
    return path


def test_replicas_go_to_nodes_of_their_type_of_gpu(tmp_path: Path) -> None:
    done = run("plan", "render", typed_plan_file(tmp_path, ("spot", "reserved")), "--to", "kubernetes")
    assert done.exit_code == 0, done.output
    objects = list(yaml.safe_load_all((tmp_path / "plan.kubernetes.yaml").read_text()))
    selectors = {
        o["metadata"]["name"]: o["spec"]["template"]["spec"].get("nodeSelector")
        for o in objects
        if o["kind"] == "Deployment"
    }
    assert selectors["small-tp1pp1-spot"] == {"penstock/gpu-type": "spot"}
    assert selectors["large-tp4pp1-reserved"] == {"penstock/gpu-type": "reserved"}
    assert selectors["router"] is None
    both = run("plan", "render", typed_plan_file(tmp_path, ("spot", "reserved")), "--to", "compose")
    assert both.exit_code == 2
    assert "compose is for one machine: the plan needs GPUs of spot and reserved" in both.output
    unknown = run("plan", "render", typed_plan_file(tmp_path, ("spot", "l4")), "--to", "kubernetes")
    assert unknown.exit_code == 2
    assert "tiers[2].replicas[0]: the cluster has no GPUs of type 'l4': reserved, spot" in unknown.output
