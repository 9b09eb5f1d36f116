"""Settings: a bad value ends the boot with the name of its field; every setting does something."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.services.field_problems import SettingsError, joined
from penstock.services.mesh_check import check_mesh_file
from penstock.services.mesh_file import digest, load_mesh_file
from penstock.services.mesh_schema.judge import MeshJudge, MeshScorer
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.mesh_schema.planner import MeshPlanner, MeshReplan
from penstock.services.mesh_schema.router import MeshRouter
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.services.settings import ServiceSettings
from scripts.settings_page import documented

ROOT = Path(__file__).parents[2]
TIERS: list[dict[str, Any]] = [{"name": "a", "model": "m", "threshold": 50}, {"name": "b", "model": "n"}]


def write(folder: Path, content: Any) -> Path:
    path = folder / "mesh.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


REPLAN = {"enabled": True, "question": "question.yaml"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[", "not YAML: line 1, column 2"),
        ({"tiers": []}, "tiers"),
        ({"tiers": [{"name": "A!", "model": "m"}]}, r"tiers[0].name"),
        ({"tiers": [{"name": "a", "model": "m", "threshold": 5}]}, "threshold"),
        ({"tiers": [*TIERS, {"name": "b", "model": "m"}]}, "threshold"),
        ({"tiers": [{**TIERS[0], "color": "red"}, TIERS[1]]}, "tiers[0].color: no such field"),
        ({"tiers": TIERS, "judge": {"scorer": []}}, "judge.scorer: no such field: did you mean 'scorers'?"),
        ({"tiers": TIERS, "planner": {"replan": {**REPLAN, "question": ""}}}, "planner.replan.question"),
        ({"tiers": TIERS, "planner": {"judge_unavailable": "panic"}}, "planner.judge_unavailable"),
        ({"tiers": TIERS, "planner": {"replan": {"enabled": True}}}, "planner.replan.question"),
        ({"tiers": TIERS, "planner": {"replan": {**REPLAN, "window_s": 0}}}, "planner.replan.window_s"),
    ],
)
def test_a_bad_mesh_file_names_the_file_and_the_field(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_mesh_file(write(tmp_path, content))
    assert "mesh.yaml" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"tiers": [{"name": "a"}]}, "tiers[0].model"),
        ({"tiers": TIERS, "judge": {"scorers": [{"name": "x", "kind": "judge-model"}]}}, "judge.scorers[0].model"),
    ],
)
def test_what_an_engine_or_a_scorer_refuses_is_found_by_the_check(tmp_path: Path, content: Any, named: str) -> None:
    """Processes that run neither pass the options through."""
    path = write(tmp_path, content)
    load_mesh_file(path)
    assert named in joined(check_mesh_file(path).problems)


def test_every_fault_between_fields_is_named(tmp_path: Path) -> None:
    """Not the first one alone: who mends a file wants them all."""
    content = {
        "tiers": [{"name": "a", "model": "m"}, {"name": "b"}],
        "judge": {"scorers": [{"name": "x", "kind": "llm"}] * 2, "default_scorer": "y"},
    }
    with pytest.raises(SettingsError) as caught:
        load_mesh_file(write(tmp_path, content))
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["tiers[0].threshold", "judge.scorers", "judge.default_scorer"]


def test_a_mesh_needs_no_judge_section(tmp_path: Path) -> None:
    """One tier has nothing to judge, so no judge process; several are judged by scorers that need no model."""
    one = load_mesh_file(write(tmp_path, {"tiers": [TIERS[1]]}))
    assert one.judge.replicas == 0
    assert load_mesh_file(write(tmp_path, {"tiers": [TIERS[1]], "judge": {}})).judge.replicas == 1
    two = load_mesh_file(write(tmp_path, {"tiers": TIERS}))
    assert (two.judge.replicas, [scorer.kind for scorer in two.judge.scorers]) == (
        1,
        ["confidence", "code", "combined"],
    )


def test_a_simulated_tier_needs_no_model(tmp_path: Path) -> None:
    tier = {"name": "only", "engine": "simulated"}
    assert load_mesh_file(write(tmp_path, {"tiers": [tier]})).plan("").tiers[0].model == "only"
    named = load_mesh_file(write(tmp_path, {"tiers": [tier | {"model": "m/n"}]}))
    assert named.plan("").tiers[0].model == "n"


def test_the_environment_overrides_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LEASE_S", "7")
    assert ServiceSettings.load().lease_s == 7
    monkeypatch.setenv("PENSTOCK_LEASE_S", "never")
    monkeypatch.setenv("PENSTOCK_GRPC_PORT", "-1")
    with pytest.raises(SettingsError) as caught:
        ServiceSettings.load()
    assert "PENSTOCK_LEASE_S" in str(caught.value)
    assert "PENSTOCK_GRPC_PORT" in str(caught.value)


def test_redis_is_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = load_mesh_file(write(tmp_path, {"tiers": TIERS, "redis_url": "redis://file"}))
    assert ServiceSettings.load().state_url(mesh) == "redis://file"
    monkeypatch.setenv("REDIS_URL", "redis://env")
    assert ServiceSettings.load().state_url(mesh) == "redis://env"
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://ours")
    assert ServiceSettings.load().state_url(mesh) == "redis://ours"
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis+sentinel://h")
    with pytest.raises(SettingsError, match=r"PENSTOCK_REDIS_URL: names no service"):
        ServiceSettings.load()
    monkeypatch.delenv("PENSTOCK_REDIS_URL")
    monkeypatch.setenv("REDIS_URL", "redis+sentinel://h")
    with pytest.raises(SettingsError, match=r"REDIS_URL: names no service"):
        ServiceSettings.load().state_url(mesh)
    monkeypatch.delenv("REDIS_URL")
    with pytest.raises(SettingsError, match="redis_url"):
        ServiceSettings.load().state_url(load_mesh_file(write(tmp_path, {"tiers": TIERS})))


def test_paths_count_from_the_mesh_file(tmp_path: Path) -> None:
    settings = ServiceSettings.load(mesh_file=tmp_path / "mesh.yaml")
    assert settings.resolve("models/a") == tmp_path.resolve() / "models/a"
    assert settings.resolve("/models/a") == Path("/models/a")


def test_the_plan_of_a_mesh_file_is_what_it_says(tmp_path: Path) -> None:
    path = write(tmp_path, {"tiers": TIERS, "planner": {"judge_unavailable": "accept"}})
    plan = load_mesh_file(path).plan(digest(path))
    assert [(t.name, t.model, t.threshold, t.instances) for t in plan.tiers] == [("a", "m", 50, 1), ("b", "n", None, 1)]
    assert plan.judge_unavailable.value == "accept"
    assert len(plan.input_digest) == 16


def test_every_setting_is_documented_and_read() -> None:
    """docs/reference/settings.md names every field, and some code besides this module reads it."""
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    code = (
        "\n".join(
            path.read_text()
            for package in (
                "services",
                "worker_service",
                "router_service",
                "planner_service",
                "judge_service",
                "penstock",
            )
            for path in (ROOT / package).rglob("*.py")
            if path.name != "settings.py" and "/v1/" not in str(path)
        )
        + (settings := (ROOT / "services" / "settings.py").read_text()).partition("class ServiceSettings")[2]
        + "".join(re.findall(r"\n        return self\..*", settings))  # what properties of the settings return
    )
    models: tuple[type[Any], ...] = (
        MeshFile,
        MeshTier,
        MeshJudge,
        MeshScorer,
        MeshRouter,
        MeshPlanner,
        MeshReplan,
        ServiceSettings,
    )
    for model in models:
        for name, field in model.model_fields.items():
            shown = f"PENSTOCK_{name.upper()}" if model is ServiceSettings else name
            assert f"`{shown}`" in page, f"{model.__name__}.{name} is not in docs/reference/settings.md"
            described = field.description or documented(model).get(name) or model is ServiceSettings
            assert described, f"{model.__name__}.{name} has no docstring"
            assert re.search(rf"\.{name}\b", code), f"nobody reads {model.__name__}.{name}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [("name: a\nname: b\ntiers: []\n", "duplicate key 'name'"), ("tiers: " + "[" * 5_000, "nested too deep|not YAML")],
)
def test_files_that_would_be_read_otherwise_than_meant_are_refused(tmp_path: Path, text: str, fault: str) -> None:
    """A key that stands twice, and nesting without end."""
    path = tmp_path / "mesh.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=fault):
        load_mesh_file(path)


@pytest.mark.parametrize("count", [1, 2, 3, 64])
def test_the_limits_of_a_routers_processes_add_up_to_the_routers(count: int) -> None:
    """Each gets at least one place, and none more than one more than another."""
    file = MeshFile.model_validate({"tiers": TIERS, "router": {"max_active": 257, "max_waiting": 10}})
    shares = [file.router_share(index, count).router for index in range(count)]
    for name in ("max_active", "max_waiting", "max_connections", "judge_concurrency"):
        values = [getattr(share, name) for share in shares]
        assert sum(values) == getattr(file.router, name)
        assert max(values) - min(values) <= 1
    assert sum(share.trace_per_s for share in shares) == pytest.approx(file.router.trace_per_s)
    few = MeshFile.model_validate({"tiers": TIERS, "router": {"judge_concurrency": 1, "max_waiting": 0}})
    assert {few.router_share(index, count).router.judge_concurrency for index in range(count)} == {1}
    assert {few.router_share(index, count).router.max_waiting for index in range(count)} == {0}
    samples = [file.router_share(index, count).planner.replan.sample for index in range(count)]
    assert sum(samples) == max(count, file.planner.replan.sample)


def test_the_environment_says_how_many_processes_a_router_has(monkeypatch: pytest.MonkeyPatch) -> None:
    file = MeshFile.model_validate({"tiers": TIERS, "router": {"processes": 3, "max_active": 5}})
    assert ServiceSettings.load().processes_of_router(file) == 3
    monkeypatch.setenv("PENSTOCK_ROUTER_PROCESSES", "4")
    assert ServiceSettings.load().processes_of_router(file) == 4
    for bad in ("6", "0", "65", "two"):
        monkeypatch.setenv("PENSTOCK_ROUTER_PROCESSES", bad)
        with pytest.raises(SettingsError, match="PENSTOCK_ROUTER_PROCESSES"):
            ServiceSettings.load().processes_of_router(file)
