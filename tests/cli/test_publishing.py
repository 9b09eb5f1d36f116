"""Plans that are published to a running mesh: for its models, shown against what holds, and taken back."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli import targets
from penstock.cli.mesh_plan import PlannedTier, other_drafters
from penstock.question_files.questions import load_models
from penstock.services.domain.plans import same_model
from penstock.services.mesh_file import load_mesh_file
from penstock.types.plans import Plan, TierPlan
from tests.conftest import ROOT
from tests.support.cli import penstock, penstock_process
from tests.support.questions import asked

EXAMPLES = ROOT / "examples"
FILES = ("--cluster", EXAMPLES / "cluster-4x8-h100.yaml", "--trace", "none.csv", "--quality", "none.csv")


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The router of a mesh of two simulated tiers, which serve a `qwen3-4b` and a `qwen3-32b` by name."""
    folder = tmp_path_factory.mktemp("publish")
    content = yaml.safe_load((EXAMPLES / "mesh-simulated.yaml").read_text())
    content |= {"name": folder.name, "router": {"grpc_port": 0, "http_port": 0}}
    for tier, model in zip(content["tiers"], ("Qwen/Qwen3-4B-Instruct", "Qwen/Qwen3-32B"), strict=True):
        tier["served_model_name"] = model
    file = folder / "mesh.yaml"
    file.write_text(yaml.safe_dump(content))
    started = penstock_process("up", "-m", file, "--folder", folder, "--detach", "--json")
    assert started.returncode == 0, started.stderr
    yield json.loads(started.stdout)["admin"][0]
    assert penstock_process("down", "--folder", folder).returncode == 0


@pytest.fixture
def plan_file(tmp_path: Path) -> Callable[..., Path]:
    def write(models: tuple[str, str] = ("qwen3-4b", "qwen3-32b"), threshold: float = 61.5) -> Path:
        tiers = [
            {"name": name, "model": model, "gpus": 2, "replicas": [{"tp": 2, "pp": 1, "count": 1}]}
            for name, model in zip(("small", "large"), models, strict=True)
        ]
        names = ("cluster", "models", "quality", "trace", "gpus", "requests", "seed", "lengths", "rate")
        figures: dict[str, Any] = {
            "thresholds": [threshold],
            "tiers": tiers,
            "objective": "largest-tier",
            "quality": 85.5,
            "latency_p95_s": 2.5,
            "end_to_end_p95_s": 3.5,
            "dispatch": "capacity",
            "inputs": dict.fromkeys(names),
        }
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(figures))
        return path

    return write


def held(admin: str) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(penstock("plan", "show", "-a", admin, "--json").stdout)
    return plan


def test_a_plan_for_other_models_is_refused_with_the_difference(admin: str, plan_file: Callable[..., Path]) -> None:
    """Equal tier names are not enough; --force publishes it."""
    before = held(admin)
    file = plan_file(models=("qwen3-4b", "deepseek-r1-671b-awq"))
    refused = penstock("plan", "apply", file, "-a", admin)
    assert refused.returncode == 2
    assert (
        "large is planned for deepseek-r1-671b-awq, the mesh serves Qwen/Qwen3-32B; publish it anyway with --force"
        in refused.stderr
    )
    assert "small is planned" not in refused.stderr
    for shown in ("80 -> 61.5", "GPUs", "deepseek-r1-671b-awq"):
        assert shown in refused.stderr
    assert held(admin) == before
    assert penstock("plan", "apply", file, "--force", "-a", admin).returncode == 0
    assert held(admin)["tiers"][0]["threshold"] == 61.5
    assert penstock("plan", "rollback", "-a", admin).returncode == 0


def test_a_plan_with_drafters_that_no_worker_loads_is_refused(admin: str, plan_file: Callable[..., Path]) -> None:
    """Workers load them when they start. With --force its thresholds are published, and the plan still says what drafts."""
    before, file = held(admin), plan_file(threshold=44)
    figures = json.loads(file.read_text())
    figures["tiers"][1]["speculation"] = {"max_window": 5, "drafters": [{"model": "qwen3-0.6b"}]}
    file.write_text(json.dumps(figures))
    refused = penstock("plan", "apply", file, "-a", admin)
    assert refused.returncode == 2
    assert "large is planned with drafts of qwen3-0.6b, its workers load nothing" in refused.stderr
    assert "tiers[].speculation" in refused.stderr
    assert "- -> qwen3-0.6b" in refused.stderr
    assert held(admin) == before
    assert penstock("plan", "apply", file, "--force", "-a", admin).returncode == 0
    assert held(admin)["tiers"][0]["threshold"] == 44
    assert held(admin)["tiers"][1]["drafters"] == []
    assert penstock("plan", "rollback", "-a", admin).returncode == 0


def test_a_plan_for_these_models_is_published_and_its_difference_shown(
    admin: str, plan_file: Callable[..., Path]
) -> None:
    before = held(admin)
    done = penstock("plan", "apply", plan_file(threshold=33), "-a", admin)
    assert done.returncode == 0, done.stderr
    assert "80 -> 33" in done.stdout
    steps = "1. start 1 x small (TP=2), 1 x large (TP=2) 2. stop 1 x small (TP=1), 1 x large (TP=1)"
    assert steps in " ".join(done.stdout.split())
    assert [tier["replicas"][0]["tp"] for tier in held(admin)["tiers"]] == [2, 2]
    assert held(admin)["revision"] == before["revision"] + 1
    newest, *_, first = json.loads(penstock("plan", "history", "-a", admin, "--json").stdout)
    assert (newest["source"], newest["prediction"]["quality"]) == ("planned", 85.5)
    assert (first["source"], first["prediction"]) == ("mesh-file", None)
    lines = penstock("plan", "history", "-a", admin, columns=40).stdout.splitlines()
    assert any("predicted: quality 85.5, p95 2.50 s, end to end 3.50 s" in line for line in lines), "not wrapped"


def test_an_unfitting_plan_is_not_solved_for(admin: str, tmp_path: Path) -> None:
    """`plan --apply` looks at the mesh first: the trace, which comes after, does not even exist."""
    two = tmp_path / "two.yaml"
    content = yaml.safe_load((EXAMPLES / "deepseek-cascade.yaml").read_text())
    two.write_text(yaml.safe_dump(content | {"tiers": [content["tiers"][0], content["tiers"][2]]}))
    for models, said in ((two, "the plan is for other models"), (EXAMPLES / "deepseek-cascade.yaml", "has the tiers")):
        done = penstock("plan", *FILES, "--models", models, "--min-quality", 80, "--apply", "-a", admin)
        assert done.returncode == 2
        assert said in done.stderr
    forced = penstock("plan", *FILES, "--models", two, "--min-quality", 80, "--apply", "--force", "-a", admin)
    assert (forced.returncode, "none.csv" in forced.stderr) == (2, True)


def test_candidates_may_have_more_than_the_tiers_of_the_mesh(admin: str, tmp_path: Path) -> None:
    """`plan --apply` with max_tiers is refused at once only where the tiers of the mesh cannot be chosen."""
    tiers = [
        {"name": "small", "model": "qwen3-4b"},
        {"name": "medium", "model": "qwen2.5-14b"},
        {"name": "large", "model": "qwen3-32b"},
    ]
    models = tmp_path / "models.yaml"
    for chosen, said in ((tiers, "none.csv"), (tiers[:2], "has the tiers small, the mesh has small, large")):
        models.write_text(yaml.safe_dump({"tiers": chosen}))
        options = (*asked(max_tiers=2), "--min-quality", 80, "--apply", "-a", admin)
        done = penstock("plan", *FILES, "--models", models, *options)
        assert done.returncode == 2
        assert said in done.stderr


@pytest.mark.parametrize("name", ["qwen2.5", "llama-3.1"])
def test_the_example_cascades_are_for_the_example_meshes(name: str) -> None:
    """What docs/how-to/real-models.md plans can be applied to what it starts, without --force."""
    mesh = load_mesh_file(EXAMPLES / f"mesh-{name}-8gpu.yaml")
    found = load_models(EXAMPLES / f"{name}-cascade.yaml").tiers
    assert [tier.name for tier in found] == [tier.name for tier in mesh.tiers]
    assert all(same_model(tier.served_name, one.model.name) for tier, one in zip(mesh.tiers, found, strict=True))


def test_an_earlier_plan_is_published_again(admin: str) -> None:
    """Rolling back is a new revision with all that the earlier plan said; without a number, of the plan before this one."""
    first = held(admin)
    for threshold in (41, 42):
        assert penstock("plan", "set", "--threshold", f"small={threshold}", "-a", admin).returncode == 0
    done = penstock("plan", "rollback", first["revision"], "--note", "worse", "-a", admin, "--json")
    assert done.returncode == 0, done.stderr
    back = json.loads(done.stdout)
    assert (back["revision"], back["source"], back["note"]) == (first["revision"] + 3, "rollback", "worse")
    for same in ("tiers", "scorer", "judge_unavailable", "prediction"):
        assert back[same] == first[same]
    assert penstock("plan", "set", "--threshold", "small=43", "-a", admin).returncode == 0
    done = penstock("plan", "rollback", "-a", admin)
    assert done.returncode == 0, done.stderr
    assert held(admin)["tiers"][0]["threshold"] == first["tiers"][0]["threshold"]
    done = penstock("plan", "rollback", "-a", admin)
    assert done.returncode == 2
    assert "is a rollback itself" in done.stderr, "the plan before it is the one that was left"


def test_a_plan_that_delivers_best_answers_still_does_after_set_apply_and_rollback(
    admin: str, plan_file: Callable[..., Path]
) -> None:
    with targets.planner(admin) as planner:
        before = planner.get_plan()
        first = planner.set_plan(replace(before, best_answer=True)).revision
    assert penstock("plan", "show", "-a", admin).stdout.count("the answer with the highest score") == 1
    for command in (("set", "--threshold", "small=47"), ("apply", plan_file()), ("rollback", first)):
        assert penstock("plan", *command, "-a", admin).returncode == 0
        assert held(admin)["best_answer"]
    with targets.planner(admin) as planner:
        planner.set_plan(before)
    assert "the answer with the highest score" not in penstock("plan", "show", "-a", admin).stdout


def test_a_plan_set_without_a_change_is_refused(admin: str) -> None:
    """It would fill the history, and make the next rollback do nothing."""
    now = held(admin)["revision"]
    done = penstock("plan", "set", "--note", "nothing", "-a", admin)
    assert done.returncode == 2
    assert "--threshold" in done.stderr
    assert held(admin)["revision"] == now


def test_what_cannot_be_rolled_back_to_is_said(admin: str) -> None:
    now = held(admin)["revision"]
    for revision, status, said in ((now, 2, "is the current one"), (now + 7, 1, str(now + 7))):
        done = penstock("plan", "rollback", revision, "-a", admin)
        assert done.returncode == status
        assert said in done.stderr


@pytest.mark.parametrize(
    ("served", "planned", "same"),
    [
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b", True),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", True),
        ("qwen3-4b", "qwen3-4b", True),
        ("qwen3-4b", "qwen3-4b-instruct", False),
        ("Qwen2.5-72B-Instruct", "qwen2.5-7b", False),
        ("Qwen2.5-7B-Instruct", "qwen2.5-72b", False),
        ("small", "", False),
    ],
)
def test_a_model_is_the_planned_one_by_organisation_case_and_what_follows(
    served: str, planned: str, same: bool
) -> None:
    assert same_model(served, planned) == same


def test_drafters_are_compared_as_models_are_and_in_any_order() -> None:
    current = Plan(tiers=(TierPlan("large", "m", None, 1, drafters=("Qwen2.5-1.5B-Instruct", "small")),))

    def other(*names: str) -> str:
        return other_drafters(current, [PlannedTier("large", "m", drafters=names)])

    assert other("small", "qwen2.5-1.5b") == other() == ""  # a plan that names none says nothing of them
    assert other("small").endswith("planned with drafts of small, its workers load Qwen2.5-1.5B-Instruct, small")
    assert "medium" in other("small", "medium")
