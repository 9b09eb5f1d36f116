"""A plan as a compose file and as values of the chart: every GPU is used once, every flag says what was planned."""

import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.judge_service.scorers.llm.extension import Llm
from penstock.services.extensions.scorers import scorer_of
from penstock.services.mesh_file import load_mesh_file
from penstock.services.mesh_schema.mesh import MeshFile
from tests.conftest import ROOT
from tests.support.cli import penstock as run

SHAPES: tuple[list[tuple[int, int, int]], ...] = ([(2, 1, 1), (1, 2, 1)], [], [(1, 4, 1)])  # (count, tp, pp) by tier


def plan_file(folder: Path, shapes: Any, nodes: int = 1, models: str = "deepseek-cascade.yaml") -> Path:
    cluster = folder / "cluster.yaml"
    cluster.write_text(yaml.safe_dump({"gpu": "h100", "nodes": nodes, "gpus_per_node": 8}))
    inputs = dict.fromkeys(("quality", "trace", "gpus", "seed", "rate", "requests", "lengths"))
    named = yaml.safe_load((ROOT / "examples" / models).read_text())["tiers"]
    tiers = [
        {
            "name": tier["name"],
            "model": str(tier["model"]),
            "gpus": sum(c * t * p for c, t, p in parts),
            "replicas": [{"count": c, "tp": t, "pp": p} for c, t, p in parts],
        }
        for tier, parts in zip(named, shapes, strict=True)
    ]
    path = folder / "plan.json"
    content = {
        "inputs": inputs | {"cluster": str(cluster), "models": str(ROOT / "examples" / models)},
        "thresholds": [72.5, None],
        "tiers": tiers,
        "dispatch": "capacity",
        "quality": 84.0,
        "latency_p95_s": 5.0,
        "end_to_end_p95_s": 5.0,
        "objective": "end-to-end",
    }
    path.write_text(json.dumps(content))
    return path


def flags(arguments: list[str]) -> dict[str, str]:
    return {a: b for a, b in itertools.pairwise(arguments) if a.startswith("--") and not b.startswith("--")}


def test_a_compose_file_for_replicas_of_unlike_shapes(tmp_path: Path) -> None:
    done = run("plan", "render", plan_file(tmp_path, SHAPES), "--to", "compose")
    assert done.returncode == 0, done.output
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
    assert run("plan", "render", plan, "--to", "compose").returncode == 0
    services = yaml.safe_load((tmp_path / "plan.compose.yaml").read_text())["services"]
    command = flags(services["sglang-large-tp8pp1ep8attndp8-0"]["command"])
    named = ("--tp-size", "--ep-size", "--attn-dp-size", "--moe-a2a-backend", "--max-running-requests")
    assert [command[name] for name in named] == ["8", "8", "8", "deepep", "256"]


def test_compose_is_for_one_machine(tmp_path: Path) -> None:
    done = run("plan", "render", plan_file(tmp_path, ([(12, 1, 1)], [], []), nodes=2), "--to", "compose")
    assert done.returncode == 2
    assert "the plan needs 12 GPUs, a node has 8; the Helm chart" in " ".join(done.output.split())
    assert not (tmp_path / "plan.compose.yaml").exists()
    assert run("plan", "render", tmp_path / "plan.json", "--to", "nomad").returncode == 2


def values_of(plan: Path, *mesh: object) -> dict[str, Any]:
    """The values of the chart for a plan."""
    done = run("values", *mesh, "--plan", plan)
    assert done.returncode == 0, done.output
    values = yaml.safe_load(done.stdout)
    assert isinstance(values, dict)
    return values


def test_the_chart_gets_every_group_of_replicas(tmp_path: Path) -> None:
    """CASCADIA's row (90, 1): its large tier has replicas of 8 and of 12 GPUs, the latter over three nodes."""
    plan = plan_file(tmp_path, ([(4, 1, 1)], [(2, 4, 1)], [(1, 4, 3), (1, 8, 1)]), nodes=4)
    values = values_of(plan)
    placed = {w["name"]: (w["tier"], w["replicas"], w["gpus"], w["nodes"]) for w in values["workers"]}
    assert placed == {
        "small-tp1pp1": ("small", 4, 1, 1),
        "medium-tp4pp1": ("medium", 2, 4, 1),
        "large-tp4pp3": ("large", 1, 4, 3),
        "large-tp8pp1": ("large", 1, 8, 1),
    }
    told = {w["name"]: flags(w["server"]["command"]) for w in values["workers"]}
    assert [told["large-tp4pp3"][flag] for flag in ("--tp-size", "--pp-size", "--host")] == ["4", "3", "0.0.0.0"]
    assert told["small-tp1pp1"]["--host"] == "127.0.0.1"
    mesh = saved_mesh(values, tmp_path)
    assert [(t.workers, t.threshold) for t in mesh.tiers] == [(4, 72.5), (2, 100.0), (2, None)]


def test_a_plan_changes_of_a_given_mesh_file_what_it_says(tmp_path: Path) -> None:
    """Thresholds, counts and shapes are the plan's; models, limits, scorers and all else are the file's."""
    plan = plan_file(tmp_path, ([(2, 1, 1)], [], [(1, 4, 1)]))
    given = yaml.safe_load(run("values", "--plan", plan).stdout)["mesh"]
    content = yaml.safe_load(given) | {"router": {"max_active": 77}}
    content["tiers"][0] |= {"workers": 9, "threshold": 1, "max_running": 33}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(content))
    values = values_of(plan, path)
    mesh = saved_mesh(values, tmp_path)
    assert (mesh.router.max_active, mesh.tiers[0].workers, mesh.tiers[0].threshold) == (77, 2, 72.5)
    assert flags(values["workers"][0]["server"]["command"])["--max-running-requests"] == "33"
    content["tiers"][0]["name"] = "other"
    path.write_text(yaml.safe_dump(content))
    refused = run("values", path, "--plan", plan)
    assert refused.returncode == 2
    assert "has other, medium, large, the plan small, medium, large" in " ".join(refused.output.split())
    assert run("values").returncode == 2


def saved_mesh(values: dict[str, Any], folder: Path) -> MeshFile:
    (folder / "of-values.yaml").write_text(values["mesh"])
    return load_mesh_file(folder / "of-values.yaml")


def state_judge(plan: Path, judge: dict[str, Any]) -> None:
    """State what judges in a models file of the plan's own."""
    content = json.loads(plan.read_text())
    models = yaml.safe_load(Path(content["inputs"]["models"]).read_text())
    own = plan.parent / "models.yaml"
    own.write_text(yaml.safe_dump(models | {"judge": judge}))
    content["inputs"]["models"] = str(own)
    plan.write_text(json.dumps(content))


@pytest.mark.parametrize("to", ["compose", "values"])
def test_all_servers_of_a_tier_share_its_grading(tmp_path: Path, to: str) -> None:
    """The judge asks the tier's workers, as many requests at once as they take together; no server has an address of its own
    in the judge's settings. A stated tier grades, else the largest that is used."""
    plan = plan_file(tmp_path, ([(4, 1, 1)], [(2, 1, 1)], []))
    for judge, tier, workers in ((None, "medium", 2), ({"tier": "small", "reply_tokens": 104}, "small", 4)):
        if judge is not None:
            state_judge(plan, judge)
        mesh = rendered_mesh(plan, to)
        (scorer,) = mesh.judge.scorers
        llm = scorer_of(mesh, scorer)
        assert isinstance(llm, Llm)
        assert (llm.tier, llm.endpoint) == (tier, "")
        assert llm.concurrency == workers * mesh.tier(tier).max_running * llm.tier_share
        assert llm.thinking_tokens == (100 if judge else 0)
    state_judge(plan, {"tier": "large"})
    refused = run("values", "--plan", plan)
    assert refused.returncode == 2
    assert "judge.tier: the plan has no replicas of large" in " ".join(refused.output.split())


def rendered_mesh(plan: Path, to: str) -> MeshFile:
    """The mesh file of a plan's compose file, or of its values."""
    if to == "values":
        return saved_mesh(values_of(plan), plan.parent)
    done = run("plan", "render", plan, "--to", to)
    assert done.returncode == 0, done.output
    return load_mesh_file(plan.with_suffix(".mesh.yaml"))


def test_a_judge_model_has_its_processes(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, SHAPES)
    state_judge(plan, {"model": "grader", "replicas": 3, "token_s": 1e-5, "max_batch": 16, "max_batch_tokens": 8192})
    for to in ("compose", "values"):
        judge = rendered_mesh(plan, to).judge
        (scorer,) = judge.scorers
        assert (scorer.kind, scorer.options["model"], judge.default_scorer) == (
            "judge-model",
            "/models/grader",
            scorer.name,
        )
        assert (judge.replicas, judge.max_batch, judge.max_batch_tokens) == (3, 16, 8192)
    services = yaml.safe_load((tmp_path / "plan.compose.yaml").read_text())["services"]
    assert services["judge"]["deploy"] == {"replicas": 3}
    assert values_of(plan)["judges"] == 3


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
    values = values_of(typed_plan_file(tmp_path, ("spot", "reserved")))
    types = {w["name"]: w["gpuType"] for w in values["workers"]}
    assert types == {
        "small-tp1pp1-spot": "spot",
        "small-tp2pp1-spot": "spot",
        "large-tp4pp1-reserved": "reserved",
    }
    both = run("plan", "render", typed_plan_file(tmp_path, ("spot", "reserved")), "--to", "compose")
    assert both.returncode == 2
    assert "compose is for one machine: the plan needs GPUs of spot and reserved" in both.output
    unknown = run("values", "--plan", typed_plan_file(tmp_path, ("spot", "l4")))
    assert unknown.returncode == 2
    assert "tiers[2].replicas[0]: the cluster has no GPUs of type 'l4': reserved, spot" in unknown.output
