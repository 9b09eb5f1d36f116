"""`penstock check`: every fault of a mesh file, by field, before anything is started."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app
from tests.conftest import ROOT

SMALL: dict[str, Any] = {"name": "small", "engine": "simulated", "threshold": 50}
LARGE: dict[str, Any] = {"name": "large", "engine": "simulated"}
SGLANG: dict[str, Any] = {"name": "small", "engine": "sglang", "model": "a/b", "sglang": {"port": 30000}}


def checked(folder: Path, content: Any) -> tuple[int, dict[str, str]]:
    """(exit status, problem by field)."""
    path = folder / "mesh.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    result = CliRunner().invoke(app, ["check", str(path), "--json"])
    report = json.loads(result.stdout)
    assert report["sound"] == (result.exit_code == 0)
    return result.exit_code, {problem["field"]: problem["problem"] for problem in report["problems"]}


@pytest.mark.parametrize(
    "path",
    [ROOT / "mesh.yaml", ROOT / "deploy" / "mesh-gpu.yaml", *sorted((ROOT / "examples").glob("mesh-*.yaml"))],
    ids=lambda path: path.name,
)
def test_every_shipped_mesh_file_is_sound(path: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 0, done.output
    assert "sound" in done.stdout


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ({"tiers": [SMALL, LARGE]}, {}),
        ({"tiers": [{**SMALL, "engine": "torch", "model": "nowhere"}, LARGE]}, {"tiers[0].model": "no folder"}),
        ({"tiers": [{**SMALL, "engine": "torch", "model": "."}, LARGE]}, {"tiers[0].model": "no config.json"}),
        ({"tiers": [{**SMALL, "engine": "torch", "model": "organisation/name"}, LARGE]}, {}),
        ({"tiers": [{**SMALL, "engine": "torch"}, LARGE]}, {"tiers[0].model": "the torch engine needs a model"}),
        ({"tiers": [{**SMALL, "enigne": "torch"}, LARGE]}, {"tiers[0].enigne": "did you mean 'engine'?"}),
        ({"teirs": []}, {"teirs": "did you mean 'tiers'?", "tiers": "required"}),
        ({"tiers": [LARGE, SMALL]}, {"tiers[0].threshold": "missing", "tiers[1].threshold": "must not be set"}),
        (
            {"tiers": [{**SMALL, "engine": "sglang", "model": "a/b", "sglang": {"python": "/none/python"}}, LARGE]},
            {"tiers[0].sglang.python": "no program"},
        ),
        ({"tiers": [SMALL, LARGE], "judge": {"replicas": 0}}, {"judge.replicas": "need a judge"}),
        ({"tiers": [SMALL, LARGE], "redis_url": "not a url"}, {"redis_url": "must be redis://"}),
        ({"tiers": [SMALL, LARGE], "redis_url": "redis://h:port/0"}, {"redis_url": "the port must be a number"}),
        (
            {"tiers": [SMALL, LARGE], "router": {"grpc_port": 65535, "replicas": 2}},
            {"router.grpc_port": "leaves no ports for 2 routers"},
        ),
        (
            {"tiers": [SMALL, LARGE], "router": {"grpc_port": 8000, "http_port": 8001, "replicas": 2}},
            {"router.http_port": "ports 8001 to 8002 overlap router.grpc_port"},
        ),
        (
            {
                "tiers": [
                    {**SGLANG, "threshold": 50, "workers": 3},
                    {**SGLANG, "name": "large", "sglang": {"port": 30002}},
                ]
            },
            {"tiers[1].sglang.port": "ports 30002 to 30002 overlap tiers[0].sglang.port, which is 30000 to 30002"},
        ),
        (
            {
                "tiers": [
                    {**SGLANG, "threshold": 50, "workers": 2},
                    {**SGLANG, "name": "large", "sglang": {"port": 30002}},
                ]
            },
            {},
        ),
        (
            {"tiers": [{**SGLANG, "threshold": 50}, {**SGLANG, "name": "large", "workers": 0}]},
            {},
        ),
        (
            {"tiers": [SMALL, {**SGLANG, "name": "large", "sglang": {"port": 65535}, "workers": 2}]},
            {"tiers[1].sglang.port": "leaves no ports for 2 SGLang servers"},
        ),
        (
            {"tiers": [SMALL, {**SGLANG, "name": "large", "sglang": {"port": 8000}}]},
            {"tiers[1].sglang.port": "overlap router.http_port"},
        ),
        ({"tiers": [SMALL, LARGE], "router": {"processes": 0}}, {"router.processes": "greater than or equal to 1"}),
        ({"tiers": [SMALL, LARGE], "router": {"processes": 1000}}, {"router.processes": "less than or equal to 64"}),
        (
            {"tiers": [SMALL, LARGE], "router": {"processes": 4, "max_active": 3}},
            {"router.processes": "each process needs a place"},
        ),
        ({"tiers": [SMALL, {**LARGE, "workers": 1025}]}, {"tiers[1].workers": "less than or equal to 1024"}),
        ({"tiers": [SMALL, LARGE], "planner": {"replicas": 0}}, {"planner.replicas": "greater than or equal to 1"}),
        ({"tiers": [{**SMALL, "device": "abacus"}, LARGE]}, {"tiers[0].device": "unknown device 'abacus'"}),
        ({"tiers": [{**SMALL, "device": "cuda:"}, LARGE]}, {"tiers[0].device": "unknown device 'cuda:'"}),
        ({"tiers": [{**SMALL, "device": "cuda:1"}, LARGE]}, {}),
        ({"tiers": [SMALL, LARGE], "judge": {"device": "gpu"}}, {"judge.device": "must be one of cpu, cuda"}),
        ({"tiers": [SMALL, LARGE], "name": "n" * 5000}, {"name": "at most 128 characters"}),
        (
            {"tiers": [SMALL, LARGE], "judge": {"scorers": [{"name": "x", "kind": "judge-model", "model": "nowhere"}]}},
            {"judge.scorers[0].model": "no folder"},
        ),
        (
            {
                "tiers": [SMALL, LARGE],
                "judge": {"scorers": [{"name": "x", "kind": "exact", "calibration": "none.json"}]},
            },
            {"judge.scorers[0].calibration": "no file"},
        ),
        (
            {
                "tiers": [SMALL, LARGE],
                "judge": {
                    "scorers": [
                        {"name": "x", "kind": "llm", "endpoint": "http://h/v1", "model": "m", "api_key_env": "NO_KEY"}
                    ]
                },
            },
            {"judge.scorers[0].api_key_env": "NO_KEY is not set"},
        ),
        (
            {
                "tiers": [SMALL, LARGE],
                "planner": {
                    "replan": {
                        "enabled": True,
                        "min_quality": 80,
                        **dict.fromkeys(("cluster", "models", "trace", "quality"), "mesh.yaml"),
                        "trace": "none.csv",
                    }
                },
            },
            {"planner.replan.trace": "no file"},
        ),
    ],
)
def test_each_fault_is_said_with_its_field(tmp_path: Path, content: Any, fields: dict[str, str]) -> None:
    status, found = checked(tmp_path, content)
    assert status == (1 if fields else 0)
    assert set(found) == set(fields)
    for field, said in fields.items():
        assert said in found[field]


def test_one_fault_hides_no_other(tmp_path: Path) -> None:
    """Faults within fields, between fields and outside the file come out at once, and nothing that only follows from them."""
    content = {
        "tiers": [
            {"engine": "torch", "model": "nowhere", "workers": -1},
            {**SMALL, "threshold": 300},
            {**LARGE, "engine": "torhc", "colour": "red"},
        ],
        "judge": {"scorers": [{"name": "x", "kind": "vibes"}], "default_scorer": "y"},
        "router": {"grpc_port": 70000},
    }
    status, found = checked(tmp_path, content)
    assert status == 1
    assert set(found) == {
        "tiers[0].name",
        "tiers[0].workers",
        "tiers[0].threshold",
        "tiers[0].model",
        "tiers[1].threshold",
        "tiers[2].engine",
        "tiers[2].colour",
        "judge.scorers[0].kind",
        "judge.default_scorer",
        "router.grpc_port",
    }


def test_the_environment_that_services_read_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LEASE_S", "never")
    assert set(checked(tmp_path, {"tiers": [SMALL, {**LARGE, "threshold": 1}]})[1]) == {
        "tiers[1].threshold",
        "PENSTOCK_LEASE_S",
    }


@pytest.mark.parametrize("content", ["[", "- a", ""])
def test_what_is_no_mesh_file_is_named(tmp_path: Path, content: str) -> None:
    status, found = checked(tmp_path, content)
    assert status == 1
    (problem,) = found.values()
    assert "mesh.yaml" in problem


def test_a_person_reads_a_line_per_fault(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(yaml.safe_dump({"tiers": [{**SMALL, "worker": 2}, {**LARGE, "threshold": 5}]}))
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 1
    assert [line.removeprefix(f"{path}: ").partition(": ")[0] for line in done.stderr.splitlines()] == [
        "tiers[0].worker",
        "tiers[1].threshold",
    ]
    nowhere = CliRunner().invoke(app, ["check", str(tmp_path / "none.yaml")])
    assert (nowhere.exit_code, nowhere.stderr) == (1, f"{tmp_path / 'none.yaml'}: No such file or directory\n")


def test_the_version_is_printed() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"penstock {penstock.__version__}\n")
