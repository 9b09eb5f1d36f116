"""What a plan says of drafts reaches the mesh as it was planned: by file, by manifests and over gRPC."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from penstock import JudgedPrompt, PlanningInputs
from penstock.cli.main import app
from penstock.client.messages.planning import plan_event_from_proto, planning_inputs_to_proto
from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.files import FileError, read_site
from planner_service.plan_cascade import plan_cascade
from planner_service.plan_file import read_plan, read_planned_site
from planner_service.planned_drafts import planned_speculation
from planner_service.planning_codec import inputs_from_proto, plan_to_proto
from planner_service.simulator.speculation import known_models
from services.domain.errors import InvalidRequest
from services.domain.hardware import ReplicaShape
from services.domain.speculation.choice import best, windows
from services.mesh_file import load_mesh_file
from services.mesh_schema import MeshSpeculation

CLUSTER = {"gpu": "h100", "nodes": 1, "gpus_per_node": 2}
DRAFTERS = [{"model": "qwen2.5-1.5b", "acceptance": 0.8}, {"model": "qwen2.5-0.5b", "acceptance": 0.6}]
LARGE = {"name": "large", "model": "qwen2.5-14b", "speculation": {"drafters": DRAFTERS, "max_window": 5}}
CASCADE: dict[str, Any] = {"tiers": [{"name": "small", "model": "qwen2.5-3b"}, LARGE]}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def planned(folder: Path) -> Path:
    """A plan file of `penstock plan`, for one GPU per tier."""
    rng = np.random.default_rng(3)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (folder / "models.yaml").write_text(yaml.safe_dump(CASCADE))
    with (folder / "trace.csv").open("w", newline="") as file:
        rows = [(i / 2, 100, 50) for i in range(100)]
        csv.writer(file).writerows([("arrival_s", "input_tokens", "output_tokens"), *rows])
    with (folder / "quality.csv").open("w", newline="") as file:
        names = ("small_output_tokens", "small_judge_score", "large_output_tokens", "large_judge_score")
        scores = [(100, 60, int(rng.integers(20, 90)), 60, 95) for _ in range(60)]
        csv.writer(file).writerows([("input_tokens", *names), *scores])
    out = folder / "plan.json"
    inputs = [f"--{name}={folder / file}" for name, file in (("cluster", "cluster.yaml"), ("models", "models.yaml"))]
    inputs += [f"--{name}={folder / name}.csv" for name in ("trace", "quality")]
    done = run("plan", *inputs, "--min-quality", 75, "--requests", 40, "--runs", 0, "--out", out)
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(tmp_path_factory.mktemp("planned"))


def copied(plan: Path, folder: Path, cascade: dict[str, Any] = CASCADE) -> Path:
    """The plan with a models file of its own."""
    content = json.loads(plan.read_text())
    (folder / "models.yaml").write_text(yaml.safe_dump(cascade))
    content["inputs"]["models"] = str(folder / "models.yaml")
    (folder / "plan.json").write_text(json.dumps(content))
    return folder / "plan.json"


def test_a_plan_file_has_drafters_memory_and_the_choice_of_every_batch_size(plan: Path) -> None:
    """By the worker's own choice; memory is what the replica's KV capacity leaves out."""
    small, large = json.loads(plan.read_text())["tiers"]
    assert small["speculation"] is None
    speculation = large["speculation"]
    assert [drafter["model"] for drafter in speculation["drafters"]] == ["qwen2.5-0.5b", "qwen2.5-1.5b"]
    assert speculation["max_window"] == 5
    (drafts,) = speculation["replicas"]
    assert (drafts["tp"], drafts["pp"]) == (1, 1)
    assert [choice["replies"] for choice in drafts["choices"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    site = read_planned_site(read_plan(plan))
    target, drafters = site.step_times(1, ReplicaShape(1, 1))
    for choice in drafts["choices"]:
        cost, models = known_models(target, drafters, choice["replies"], 512, 5)
        candidate, _ = best(choice["replies"], cost, models, windows(5))
        assert candidate is not None
        assert [speculation["drafters"][m]["model"] for m in candidate.chain] == choice["chain"]
        assert candidate.window == choice["window"]
    replica, _ = site.replica(1, ReplicaShape(1, 1), 1)
    assert replica is not None
    weights = sum(drafter["weights_gb"] for drafter in speculation["drafters"])
    kv_bytes = sum(drafter["kv_bytes_per_token"] for drafter in speculation["drafters"])
    assert drafts["memory_gb"] == pytest.approx(weights + replica.kv_tokens * kv_bytes / 1e9)
    room = site.cluster.gpu.memory_bytes * 0.92 - 1e9 - site.models[1].weight_bytes
    own_kv = replica.kv_tokens * site.models[1].kv_bytes_per_token
    assert drafts["memory_gb"] * 1e9 + own_kv == pytest.approx(room, rel=1e-4)


@pytest.mark.parametrize("form", ["compose", "kubernetes"])
def test_workers_of_the_rendered_mesh_draft_as_planned(form: str, plan: Path, tmp_path: Path) -> None:
    """Plan, file, manifests, mesh file, parsed settings: the same drafters and window."""
    own = copied(plan, tmp_path)
    content = json.loads(own.read_text())
    content["tiers"][0]["replicas"] = [{"tp": 1, "pp": 1, "count": 1}]  # so that there is a tier without drafters
    own.write_text(json.dumps(content))
    done = run("plan", "render", own, "--to", form)
    assert done.exit_code == 0, done.output
    documents = list(yaml.safe_load_all((tmp_path / f"plan.{form}.yaml").read_text()))
    mesh_path = tmp_path / "plan.mesh.yaml"
    if form == "kubernetes":
        config = next(o for o in documents if o["kind"] == "ConfigMap")
        mesh_path.write_text(config["data"]["mesh.yaml"])
        (workload,) = (o for o in documents if o["metadata"]["name"] == "large-tp1pp1")
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
        variables = {v["name"]: v.get("value") for v in container["env"]}
        names = [o["metadata"]["name"] for o in documents]
    else:
        (services,) = (document["services"] for document in documents)
        worker = services["worker-large-tp1pp1-0"]
        (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
        (other,) = services["sglang-small-tp1pp1-0"]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] != other["device_ids"]
        variables, names = worker["environment"], list(services)
    assert variables["PENSTOCK_TIER"] == "large"
    assert "PENSTOCK_SGLANG_ENDPOINT" not in variables
    assert not [name for name in names if name.startswith(("sglang-large", "large-server"))]
    small, large = load_mesh_file(mesh_path).tiers
    expected = json.loads(own.read_text())["tiers"][1]["speculation"]
    folders = tuple(f"/models/{drafter['model']}" for drafter in expected["drafters"])
    assert large.speculation == MeshSpeculation(drafters=folders, max_window=expected["max_window"])
    assert (large.engine, large.device, large.max_running, large.max_step_tokens) == ("torch", "cuda", 256, 2048)
    assert (small.engine, small.speculation) == ("sglang", MeshSpeculation())
    assert load_mesh_file(mesh_path).judge.scorers[0].tier == "large"


def test_a_drafter_that_the_models_file_does_not_have_is_named(plan: Path, tmp_path: Path) -> None:
    fewer = {"tiers": [CASCADE["tiers"][0], LARGE | {"speculation": {"drafters": DRAFTERS[:1]}}]}
    own = copied(plan, tmp_path, fewer)
    inputs = json.loads(own.read_text())["inputs"]
    for arguments in (
        ("plan", "render", own, "--to", "compose"),
        ("plan", "diff", plan, own),
        ("simulate", "--plan", own, "--trace", inputs["trace"]),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, arguments
        said = " ".join(done.output.split())
        assert "tiers[1].speculation.drafters[0].model: 'qwen2.5-0.5b' does not draft for tier 'large'" in said


def test_replicas_over_several_gpus_are_not_planned_with_drafters(plan: Path, tmp_path: Path) -> None:
    """Only Penstock's own engine drafts as planned. An edited plan file is refused."""
    own = copied(plan, tmp_path)
    content = json.loads(own.read_text())
    content["tiers"][1]["replicas"] = [{"tp": 2, "pp": 1, "count": 1}]
    own.write_text(json.dumps(content))
    done = run("plan", "render", own, "--to", "kubernetes")
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "tiers[1].replicas[0]: large has drafters: the engine that drafts runs a replica on one GPU" in said


def test_a_diff_shows_what_drafts_and_restarts_those_replicas(plan: Path, tmp_path: Path) -> None:
    """The same shapes; only the window of one tier differs."""
    own = copied(plan, tmp_path)
    content = json.loads(own.read_text())
    content["tiers"][1]["speculation"]["max_window"] = 2
    own.write_text(json.dumps(content))
    same = json.loads(run("plan", "diff", plan, plan, "--json").output)
    assert same["move"]["steps"] == []
    changed = json.loads(run("plan", "diff", plan, own, "--json").output)
    assert [each["max_window"] for each in changed["tiers"][1]["speculation"]] == [5, 2]
    assert changed["tiers"][0]["speculation"] == [None, None]
    started = list(itertools.chain.from_iterable(step["starts"] for step in changed["move"]["steps"]))
    assert {start["tier"] for start in started} == {"large"}
    weights = sum(drafter["weights_gb"] for drafter in content["tiers"][1]["speculation"]["drafters"])
    own_gb = read_planned_site(read_plan(own)).models[1].weight_bytes / 1e9
    assert changed["move"]["loaded_gb"] == pytest.approx(sum(s["count"] for s in started) * (own_gb + weights))
    shown = run("plan", "diff", plan, own).output
    assert "large: drafts" in shown
    assert "up to 2" in shown
    assert "drafts" not in run("plan", "diff", plan, plan).output


def asked() -> PlanningInputs:
    prompts = [JudgedPrompt(100, (60, 60), (score, 95.0)) for score in (50.0, 70.0, 90.0)]
    return PlanningInputs(CLUSTER, CASCADE, [(i / 2, 100, 50) for i in range(40)], prompts, requests=40)


def test_an_rpc_plans_with_what_the_file_says_and_answers_with_the_choice(tmp_path: Path) -> None:
    """The SDK sends the content of the files; the answer is what a plan file would have."""
    site, demand = inputs_from_proto(planning_inputs_to_proto(asked()))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(CASCADE))
    assert site.speculation == read_site(tmp_path / "cluster.yaml", tmp_path / "models.yaml").speculation
    computed = plan_cascade(site, demand, min_quality=75)
    response = pb.PlanCascadeResponse(finished=pb.PlanFinished(plan=plan_to_proto(computed, site, demand, 1.0)))
    answer: Any = plan_event_from_proto(response)
    expected = planned_speculation(site, 1, computed.tiers[1].strategy.replicas)
    assert expected is not None
    speculation = answer.tiers[1].speculation
    assert [(d.model, d.acceptance) for d in speculation.drafters] == [("qwen2.5-0.5b", 0.6), ("qwen2.5-1.5b", 0.8)]
    assert [d.memory_bytes for d in speculation.replicas] == [d.memory_bytes for d in expected.replicas]
    choices = [(c.replies, c.chain, c.window) for r in speculation.replicas for c in r.choices]
    assert choices == [(c.replies, c.chain, c.window) for r in expected.replicas for c in r.choices]
    assert choices
    assert answer.tiers[0].speculation is None


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ("drafters[0].acceptance = 1.5", "speculation.drafters[0].acceptance", "less than or equal to 1"),
        ("drafters[0].ClearField('acceptance')", "speculation.drafters[0].acceptance", "required"),
        ("drafters[1].acceptance = float('nan')", "speculation.drafters[1].acceptance", "finite"),
        ("drafters[0].ClearField('model_name')", "speculation.drafters[0].model", "model_name or model_spec"),
        ("drafters[0].model_name = 'gpt-9'", "speculation.drafters[0].model_name", "no model 'gpt-9'"),
        ("drafters[0].model_spec.layers = 2", "speculation.drafters[0].model_spec.hidden", "required"),
        ("max_window = 33", "speculation.max_window", "less than or equal to 32"),
        ("max_window = 0", "speculation.max_window", "greater than or equal to 1"),
        ("context_tokens = 0", "speculation.context_tokens", "greater than or equal to 1"),
        ("drafters.extend(list(speculation.drafters) * 2)", "speculation.drafters", "at most 4"),
        ("drafters[1].model_name = 'qwen2.5-1.5b'", "speculation", "drafters.1.model: 'qwen2.5-1.5b' is drafters.0"),
        ("drafters[0].model_name = 'qwen2.5-14b'", "", "speculation.drafters.0.model: must be another model"),
    ],
)
def test_every_unsound_field_of_speculation_is_named(change: str, field: str, problem: str) -> None:
    inputs = planning_inputs_to_proto(asked())
    exec(f"speculation.{change}", {"speculation": inputs.cascade.tiers[1].speculation})
    with pytest.raises(InvalidRequest) as caught:
        inputs_from_proto(inputs)
    problems = {found.field: found.problem for found in caught.value.problems}
    assert problem in problems["inputs.cascade.tiers[1]" + (f".{field}" if field else "")]


def test_measured_replicas_have_no_drafters_of_their_own() -> None:
    inputs = planning_inputs_to_proto(asked())
    inputs.cascade.tiers[1].measured.add(tp=1, pp=1, kv_tokens=9)
    with pytest.raises(InvalidRequest, match=r"inputs\.cascade\.tiers\[1\]\.speculation: not with measured"):
        inputs_from_proto(inputs)


def test_a_shape_that_drafts_needs_a_name(tmp_path: Path) -> None:
    """Workers load the model by it."""
    shape = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "head_dim": 64, "parameters": 0.162}
    tier = LARGE | {"speculation": {"drafters": [{"model": shape, "acceptance": 0.5}]}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"tiers": [tier]}))
    with pytest.raises(FileError, match=r"drafters\.0.*model\.name: is needed"):
        read_site(tmp_path / "cluster.yaml", tmp_path / "models.yaml")
