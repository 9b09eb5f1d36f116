"""What a plan says of drafts reaches the mesh as it was planned: by file, by manifests and over gRPC."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.planner_service.api.simulations import planned_site
from penstock.planner_service.codecs.plan_file import read_plan
from penstock.planner_service.files.site import site_of
from penstock.planner_service.simulator.speculation import known_models
from penstock.question_files.questions import load_cluster, load_models
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.services.domain.speculation.choice import best, windows
from penstock.services.mesh_file import load_mesh_file
from penstock.services.mesh_schema.tiers import MeshSpeculation
from tests.support.cli import penstock as run
from tests.support.present import present
from tests.support.questions import asked
from tests.support.tables import judged_header, write_table, write_trace

CLUSTER = {"gpu": "h100", "nodes": 1, "gpus_per_node": 2}
DRAFTERS = [{"model": "qwen2.5-1.5b", "acceptance": 0.8}, {"model": "qwen2.5-0.5b", "acceptance": 0.6}]
LARGE = {"name": "large", "model": "qwen2.5-14b", "speculation": {"drafters": DRAFTERS, "max_window": 5}}
NAMELESS = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "head_dim": 64, "parameters": 0.162}
CASCADE: dict[str, Any] = {"tiers": [{"name": "small", "model": "qwen2.5-3b"}, LARGE]}


def planned(folder: Path, cascade: dict[str, Any] = CASCADE, *options: object) -> Path:
    """A plan file of `penstock plan`, for one GPU per tier."""
    rng = np.random.default_rng(3)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (folder / "models.yaml").write_text(yaml.safe_dump(cascade))
    write_trace(folder / "trace.csv", ((i / 2, 100, 50) for i in range(100)))
    scores = ((100, 60, rng.integers(20, 90), 60, 95) for _ in range(60))
    write_table(folder / "quality.csv", judged_header(("small", "large")), scores)
    out = folder / "plan.json"
    inputs = [f"--{name}={folder / file}" for name, file in (("cluster", "cluster.yaml"), ("models", "models.yaml"))]
    inputs += [f"--{name}={folder / name}.csv" for name in ("trace", "quality")]
    done = run("plan", *inputs, "--min-quality", 75, *options, *asked(requests=40, runs=0), "--out", out)
    assert done.returncode == 0, done.output
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
    site = planned_site(read_plan(plan))
    target, drafters = site.step_times(1, ReplicaShape(1, 1))
    for choice in drafts["choices"]:
        cost, models = known_models(target, drafters, choice["replies"], 512, 5)
        candidate, _ = best(choice["replies"], cost, models, windows(5))
        assert [speculation["drafters"][m]["model"] for m in present(candidate).chain] == choice["chain"]
        assert present(candidate).window == choice["window"]
    replica, _ = site.replica(1, ReplicaShape(1, 1), 1)
    weights = sum(drafter["weights_gb"] for drafter in speculation["drafters"])
    kv_bytes = sum(drafter["kv_bytes_per_token"] for drafter in speculation["drafters"])
    assert drafts["memory_gb"] == pytest.approx(weights + present(replica).kv_tokens * kv_bytes / 1e9)
    room = site.cluster.gpu.memory_bytes * 0.92 - 1e9 - site.models[1].weight_bytes
    own_kv = present(replica).kv_tokens * site.models[1].kv_bytes_per_token
    assert drafts["memory_gb"] * 1e9 + own_kv == pytest.approx(room, rel=1e-4)


def test_drafters_that_do_not_help_are_off_in_the_plan_and_in_the_mesh(tmp_path: Path) -> None:
    """They would hold a replica to one GPU, on which no answer is in time; and with a looser limit, nothing uses them."""
    drafters = [{"model": "qwen2.5-0.5b", "acceptance": 0.02}]
    alone = {"tiers": [{"name": "large", "model": "qwen2.5-14b", "speculation": {"drafters": drafters}}]}
    for limit_s, tp in ((2.0, 1), (0.6, 2)):
        plan = planned(tmp_path, alone, "--max-latency", limit_s)
        (large,) = json.loads(plan.read_text())["tiers"]
        assert (large["replicas"][0]["tp"], large["speculation"]) == (tp, None)
    assert run("plan", "render", plan, "--to", "compose").returncode == 0
    (tier,) = load_mesh_file(tmp_path / "plan.mesh.yaml").tiers
    assert (tier.engine, tier.speculation) == ("sglang", MeshSpeculation())


def test_workers_of_the_rendered_mesh_draft_as_planned(plan: Path, tmp_path: Path) -> None:
    """Plan, file, manifests, mesh file, parsed settings: the same drafters and window."""
    own = copied(plan, tmp_path)
    content = json.loads(own.read_text())
    content["tiers"][0]["replicas"] = [{"tp": 1, "pp": 1, "count": 1}]  # so that there is a tier without drafters
    own.write_text(json.dumps(content))
    done = run("plan", "render", own, "--to", "compose")
    assert done.returncode == 0, done.output
    mesh_path = tmp_path / "plan.mesh.yaml"
    services = yaml.safe_load((tmp_path / "plan.compose.yaml").read_text())["services"]
    worker = services["worker-large-tp1pp1-0"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    (other,) = services["sglang-small-tp1pp1-0"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] != other["device_ids"]
    variables, names = worker["environment"], list(services)
    values = yaml.safe_load(run("values", "--plan", own).stdout)
    assert [(w["tier"], w["gpus"], "server" in w) for w in values["workers"]] == [
        ("small", 1, True),
        ("large", 1, False),
    ]
    assert variables["PENSTOCK_TIER"] == "large"
    assert "PENSTOCK_SGLANG_ENDPOINT" not in variables
    assert not [name for name in names if name.startswith(("sglang-large", "large-server"))]
    small, large = load_mesh_file(mesh_path).tiers
    expected = json.loads(own.read_text())["tiers"][1]["speculation"]
    folders = tuple(f"/models/{drafter['model']}" for drafter in expected["drafters"])
    assert large.speculation == MeshSpeculation(drafters=folders, max_window=expected["max_window"])
    assert (large.engine, large.device, large.max_running, large.max_step_tokens) == ("torch", "cuda", 256, 2048)
    assert (small.engine, small.speculation) == ("sglang", MeshSpeculation())
    assert load_mesh_file(mesh_path).judge.scorers[0].options["tier"] == "large"


def test_a_drafter_that_the_models_file_does_not_have_is_named(plan: Path, tmp_path: Path) -> None:
    fewer = {"tiers": [CASCADE["tiers"][0], LARGE | {"speculation": {"drafters": DRAFTERS[:1]}}]}
    own = copied(plan, tmp_path, fewer)
    inputs = json.loads(own.read_text())["inputs"]
    for arguments in (
        ("plan", "render", own, "--to", "compose"),
        ("simulate", "--plan", own, "--trace", inputs["trace"]),
    ):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        said = " ".join(done.output.split())
        assert "tiers[1].speculation.drafters[0].model: 'qwen2.5-0.5b' does not draft for tier 'large'" in said


def test_replicas_over_several_gpus_are_not_planned_with_drafters(plan: Path, tmp_path: Path) -> None:
    """Only Penstock's own engine drafts as planned. An edited plan file is refused."""
    own = copied(plan, tmp_path)
    content = json.loads(own.read_text())
    content["tiers"][1]["replicas"] = [{"tp": 2, "pp": 1, "count": 1}]
    own.write_text(json.dumps(content))
    done = run("values", "--plan", own)
    assert done.returncode == 2
    said = " ".join(done.output.split())
    assert "tiers[1].replicas[0]: large has drafts: the engine that drafts runs a replica on one GPU" in said


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"drafters": [{"model": "qwen2.5-0.5b", "acceptance": 1.5}]}, "drafters[0].acceptance", "from 0 to 1"),
        ({"drafters": [{"model": "qwen2.5-0.5b"}]}, "drafters[0].acceptance", "missing"),
        (
            {"drafters": [{"model": NAMELESS, "acceptance": 0.5}]},
            "drafters[0].model.name",
            "workers load the model by it",
        ),
        ({"drafters": [{"model": "gpt-9", "acceptance": 0.5}]}, "drafters[0].model", "no 'gpt-9'"),
        (
            {"drafters": [{"model": {"name": "x", "layers": 2}, "acceptance": 0.5}]},
            "drafters[0].model.hidden",
            "over 0",
        ),
        ({"max_window": 33}, "max_window", "from 1 to 32"),
        ({"max_window": 0}, "max_window", "from 1 to 32"),
        ({"context_tokens": 0}, "context_tokens", "at least 1"),
        ({"drafters": [{"model": "qwen2.5-0.5b", "acceptance": 0.5}] * 5}, "drafters", "at most 4"),
        ({"drafters": [{"model": "qwen2.5-0.5b", "acceptance": 0.5}] * 2}, "drafters[1].model", "is drafters[0], too"),
        ({"drafters": [{"model": "qwen2.5-14b", "acceptance": 0.5}]}, "drafters[0].model", "must be another model"),
    ],
)
def test_every_unsound_field_of_speculation_is_named(change: dict[str, Any], field: str, problem: str) -> None:
    cascade = {"tiers": [CASCADE["tiers"][0], CASCADE["tiers"][1] | {"speculation": change}]}
    with pytest.raises(InvalidRequest) as caught:
        site_of(load_cluster(CLUSTER), load_models(cascade))
    problems = {found.field: found.problem for found in caught.value.problems}
    assert problem in problems[f"models.tiers[1].speculation.{field}"]
