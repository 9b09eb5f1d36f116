"""`penstock check`: every fault of a mesh file, by field, before anything is started."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import __version__
from penstock.local.mesh import LocalMesh
from penstock.placement.mesh_input import MeshOptions
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_check import judging
from penstock.services.mesh_file import load_mesh_file
from penstock.services.mesh_schema.mesh import MeshFile
from penstock.services.settings import ServiceSettings
from penstock.worker_service.compose import build_engine
from tests.conftest import FAMILY, ROOT
from tests.support.cli import penstock
from tests.support.gguf import write_gguf

SMALL: dict[str, Any] = {"name": "small", "engine": "simulated", "threshold": 50}
LARGE: dict[str, Any] = {"name": "large", "engine": "simulated"}
SGLANG: dict[str, Any] = {"name": "small", "engine": "sglang", "model": "a/b", "sglang": {"port": 30000}}
REMOTE: dict[str, Any] = {"engine": "openai", "model": "m", "openai": {"endpoints": ["http://h/v1"]}}


def mesh(small: dict[str, Any] | None = None, large: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    """A mesh file of two tiers with these fields in addition to those of SMALL and LARGE."""
    return {"tiers": [SMALL | (small or {}), LARGE | (large or {})]} | parts


def servers(small: dict[str, Any], **large: Any) -> dict[str, Any]:
    """A mesh file of two tiers with SGLang servers of their own."""
    return {"tiers": [SGLANG | {"threshold": 50} | small, SGLANG | {"name": "large"} | large]}


def classed(**slo: Any) -> dict[str, Any]:
    """A mesh file with one SLO class."""
    return mesh(slo={"classes": {"a": slo}})


def ruled(**rule: Any) -> dict[str, Any]:
    """A mesh file whose small tier has this rule for long answers."""
    return mesh({"long_answers": {"from_tokens": 40, "threshold": 0.0} | rule})


def judged(**scorer: Any) -> dict[str, Any]:
    return {"scorers": [{"name": "x", **scorer}]}


def report_of(folder: Path, content: Any, *options: str) -> tuple[int, dict[str, str], dict[str, str]]:
    """(exit status, problem by field, note by field)."""
    path = folder / "mesh.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    result = penstock("check", str(path), "--json", *options)
    report = json.loads(result.stdout)
    assert report["sound"] == (result.returncode == 0)
    problems, notes = ({p["field"]: p["problem"] for p in report[kind]} for kind in ("problems", "notes"))
    return result.returncode, problems, notes


def checked(folder: Path, content: Any) -> tuple[int, dict[str, str]]:
    """(exit status, problem by field)."""
    return report_of(folder, content)[:2]


@pytest.mark.parametrize(
    "path",
    [ROOT / "mesh.yaml", ROOT / "deploy" / "mesh-gpu.yaml", *sorted((ROOT / "examples").glob("mesh-*.yaml"))],
    ids=lambda path: path.name,
)
def test_every_shipped_mesh_file_is_sound(path: Path) -> None:
    done = penstock("check", str(path))
    assert done.returncode == 0, done.output
    assert "sound" in done.stdout


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        (mesh(), {}),
        (mesh({"engine": "torch", "model": "nowhere"}), {"tiers[0].model": "no folder"}),
        (mesh({"engine": "torch", "model": "."}), {"tiers[0].model": "no config.json"}),
        (mesh({"engine": "torch", "model": "organisation/name"}), {}),
        ({"tiers": [{"name": "s", "threshold": 1, "model": "org/none.gguf"}, LARGE]}, {"tiers[0].model": "no file"}),
        (mesh({"engine": "torch"}), {"tiers[0].model": "the torch engine needs a model"}),
        (mesh({"enigne": "torch"}), {"tiers[0].enigne": "did you mean 'engine'?"}),
        ({"teirs": []}, {"teirs": "did you mean 'tiers'?", "tiers": "required"}),
        ({"tiers": [LARGE, SMALL]}, {"tiers[0].threshold": "missing", "tiers[1].threshold": "must not be set"}),
        (mesh({"engine": "torhc"}), {"tiers[0].engine": "there are llamacpp, openai, sglang, simulated, torch"}),
        (mesh({"sglang": {"tp": 2}}), {"tiers[0].sglang": "no such field"}),
        (mesh({"simulated": {"kv_dtype": "int8"}}), {"tiers[0].simulated.kv_dtype": "no such field"}),
        (mesh({"simulated": 3}), {"tiers[0].simulated": "no such field"}),
        (mesh({"dtype": "float16"}), {"tiers[0].dtype": "the simulated engine does not use it"}),
        (mesh({"best_effort_reserve": 0.1}), {"tiers[0].best_effort_reserve": "only batch_policy"}),
        (
            servers({"sglang": {"endpoint": "http://h:1", "tp": 2}}),
            {"tiers[0].sglang.tp": "is for servers that workers"},
        ),
        (mesh(judge={"replicas": 0}), {"judge.replicas": "need a judge"}),
        (mesh(redis_url="not a url"), {"redis_url": "must be redis://"}),
        (mesh(redis_url="redis://h:port/0"), {"redis_url": "the port must be a number"}),
        (mesh(redis_url="redis+sentinel://h:1,h:port/state"), {"redis_url": "the port must be a number"}),
        (mesh(redis_url="redis+sentinel://h:1,:2/state"), {"redis_url": "names no host"}),
        (mesh(redis_url="redis+sentinel://h:1,h:2"), {"redis_url": "names no service"}),
        (mesh(redis_url="redis+sentinel://h:1/state/x"), {"redis_url": "must be a number, not 'x'"}),
        (mesh(router={"grpc_port": 65535, "replicas": 2}), {"router.grpc_port": "leaves no ports for 2 routers"}),
        (
            mesh(router={"grpc_port": 8000, "http_port": 8001, "replicas": 2}),
            {"router.http_port": "8001 to 8002 overlap"},
        ),
        (
            servers({"workers": 3}, sglang={"port": 30002}),
            {"tiers[1].sglang.port": "ports 30002 to 30002 overlap tiers[0].sglang.port, which is 30000 to 30002"},
        ),
        (servers({"workers": 2}, sglang={"port": 30002}), {}),
        (servers({}, workers=0), {}),
        (servers({}, sglang={"port": 65535}, workers=2), {"tiers[1].sglang.port": "leaves no ports for 2 servers"}),
        (servers({}, sglang={"port": 8000}), {"tiers[1].sglang.port": "overlap router.http_port"}),
        (
            servers({"workers": 2, "sglang": {"tp": 2, "gpus": [0, 1]}}),
            {"tiers[0].sglang.gpus": "2 for 2 workers of 2"},
        ),
        (servers({"sglang": {"tp": 8, "ep": 3}}), {"tiers[0].sglang.ep": "must divide tp, 8, not 3"}),
        (servers({"sglang": {"attn_dp": 2}}), {"tiers[0].sglang.attn_dp": "must divide tp, 1, not 2"}),
        (
            servers({"sglang": {"tp": 2, "dp": 2, "attn_dp": 2}}),
            {"tiers[0].sglang.attn_dp": "must not be combined with dp"},
        ),
        (
            servers({"batch_policy": "slo", "sglang": {"tp": 2, "attn_dp": 2}}),
            {"tiers[0].batch_policy": "slo needs sglang.attn_dp 1, not 2: each group of attention has a batch"},
        ),
        (
            servers({"batch_policy": "slo", "sglang": {"dp": 2}}),
            {"tiers[0].batch_policy": "slo needs sglang.dp 1, not 2: each copy of the model has a batch and KV"},
        ),
        (classed(time_to_first_token_s=0), {"slo.classes.a.time_to_first_token_s": "greater than"}),
        (classed(time_per_output_token_s=1e20), {"slo.classes.a.time_per_output_token_s": ""}),
        (classed(fallback="never"), {"slo.classes.a.fallback": ""}),
        (classed(time_per_output_token_s=1, phases=[{"time_per_output_token_s": 1}]), {"slo.classes.a.phases": ""}),
        (classed(phases=[{"time_per_output_token_s": 1}] * 2), {"slo.classes.a.phases[1].from_output_token": ""}),
        (mesh(slo={"max_hops": -1}), {"slo.max_hops": "greater than or equal to 0"}),
        (ruled(from_tokens=0), {"tiers[0].long_answers.from_tokens": "must be from 1"}),
        (ruled(from_tokens=2**40), {"tiers[0].long_answers.from_tokens": "must be from 1"}),
        (ruled(threshold=-1), {"tiers[0].long_answers.threshold": "must be from 0 to 100"}),
        (mesh({"long_answers": {"from_tokens": 5}}), {"tiers[0].long_answers.threshold": "required"}),
        (mesh(large={"long_answers": {"from_tokens": 5, "threshold": 1}}), {"tiers[1].long_answers": ""}),
        (mesh({"skip_below": 30}), {"tiers[0].skip_below": "score_predictor"}),
        (mesh(large={"skip_below": 30}), {"tiers[1].skip_below": ""}),
        (
            {"tiers": [LARGE], "judge": {"replicas": 0}, "router": {"flag_below": 50}},
            {"router.flag_below": "needs a judge"},
        ),
        (mesh(router={"processes": 0}), {"router.processes": "greater than or equal to 1"}),
        (mesh(router={"processes": 1000}), {"router.processes": "less than or equal to 64"}),
        (mesh(router={"processes": 4, "max_active": 3}), {"router.processes": "each process needs a place"}),
        (mesh(large={"workers": 1025}), {"tiers[1].workers": "less than or equal to 1024"}),
        (mesh(planner={"replicas": 0}), {"planner.replicas": "greater than or equal to 1"}),
        (mesh({"device": "abacus"}), {"tiers[0].device": "unknown device 'abacus'"}),
        (mesh({"device": "cuda:"}), {"tiers[0].device": "unknown device 'cuda:'"}),
        (servers({"device": "cuda:1"}, workers=0), {}),
        (mesh(judge={"device": "gpu"}), {"judge.device": "must be one of cpu, cuda"}),
        (mesh(name="n" * 5000), {"name": "at most 128 characters"}),
        (mesh(judge=judged(kind="judge-model", model="nowhere")), {"judge.scorers[0].model": "no folder"}),
        (mesh(judge=judged(kind="exact", calibration="none.json")), {"judge.scorers[0].calibration": "no file"}),
        (mesh(judge=judged(kind="exact", rubric="x")), {"judge.scorers[0].rubric": "no such field"}),
        (mesh(judge=judged(kind="vibes")), {"judge.scorers[0].kind": "no 'vibes' is installed"}),
        (mesh(judge=judged(kind="screened", scorers=["x", "x"])), {"judge.scorers[0].scorers": "no scorer 'x' above"}),
        (mesh(judge={"scorers": []}), {"judge.scorers": "at least one is needed"}),
        (mesh(judge={"max_batch": 4}), {"judge.max_batch": "no scorer uses it"}),
        (mesh(judge=judged(kind="llm", tier="large", model="m")), {"judge.scorers[0].model": "is for an endpoint"}),
        ({"tiers": [SMALL, REMOTE | {"name": "large"}]}, {}),
        (
            mesh(planner={"replan": {"enabled": True, "question": "none.yaml"}}),
            {"planner.replan.question": "No such file"},
        ),
    ],
)
def test_each_fault_is_said_with_its_field(tmp_path: Path, content: Any, fields: dict[str, str]) -> None:
    status, found = checked(tmp_path, content)
    assert status == (1 if fields else 0)
    assert set(found) == set(fields)
    for field, said in fields.items():
        assert said in found[field]


@pytest.mark.parametrize(
    ("tier", "field", "problem"),
    [
        (SGLANG | {"sglang": {"python": "/none/python"}}, "sglang.python", "no program"),
        (SGLANG | {"sglang": {"python": sys.executable}}, "sglang.python", "has no package sglang"),
        (SGLANG | {"model": "/far/away", "sglang": {"endpoint": "http://h:1"}}, "model", "no folder /far/away"),
        (
            REMOTE | {"openai": REMOTE["openai"] | {"key_env": "NO_KEY_HERE"}},
            "openai.key_env",
            "NO_KEY_HERE is not set",
        ),
    ],
)
def test_what_a_machine_lacks_is_a_problem_where_the_mesh_is_to_run(
    tmp_path: Path, tier: dict[str, Any], field: str, problem: str
) -> None:
    mesh = {"tiers": [SMALL, LARGE | tier | {"name": "large"}]}
    status, problems, notes = report_of(tmp_path, mesh)
    assert (status, problems, [*notes]) == (0, {}, [f"tiers[1].{field}"])
    assert report_of(tmp_path, mesh, "--here") == (1, notes, {})
    assert problem in notes[f"tiers[1].{field}"]
    with pytest.raises(SettingsError, match=problem):
        LocalMesh(MeshOptions(mesh_file=tmp_path / "mesh.yaml", folder=tmp_path / "run"))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "mamba"}, "model type 'mamba' is not one of llama, qwen2, qwen3"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "(gptq). SGLang serves it"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"]}, "sliding-window attention"),
        (None, "no folder"),
        ([], "no JSON object"),
    ],
)
def test_a_model_that_the_engine_cannot_serve_is_refused(tmp_path: Path, config: Any, problem: str) -> None:
    """By `penstock check`, and in the same words by the worker. A missing one also where its path looks like a hub's id."""
    folder = tmp_path / "models" / "mine"
    (folder if config is not None else folder.parent).mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    status, found = checked(tmp_path, {"tiers": [SMALL, {**LARGE, "engine": "torch", "model": "models/mine"}]})
    assert (status, [*found]) == (1, ["tiers[1].model"])
    assert problem in found["tiers[1].model"]
    mesh = load_mesh_file(tmp_path / "mesh.yaml")
    with pytest.raises(SettingsError, match=re.escape(found["tiers[1].model"])):
        build_engine(mesh, mesh.tiers[1], ServiceSettings.load(mesh_file=tmp_path / "mesh.yaml"))


@pytest.mark.parametrize(
    ("content", "field", "note"),
    [
        (mesh({"threshold": 0.7}), "tiers[0].threshold", "70 may be meant"),
        (mesh(judge=judged(kind="exact")), "judge.default_scorer", "needs an expected answer"),
        (
            mesh(judge=judged(kind="llm", endpoint="http://h/v1", model="m", api_key_env="NO_KEY_HERE")),
            "judge.scorers[0].api_key_env",
            "NO_KEY_HERE is not set",
        ),
    ],
)
def test_what_is_sound_and_may_not_be_meant_is_remarked_on(tmp_path: Path, content: Any, field: str, note: str) -> None:
    status, problems, notes = report_of(tmp_path, content)
    assert (status, problems) == (0, {})
    assert note in notes[field]


def test_all_faults_of_fields_come_out_at_once_then_those_between_them(tmp_path: Path) -> None:
    tiers = [
        {"engine": "torch", "model": "nowhere", "workers": -1},
        {**SMALL, "threshold": 300},
        {**LARGE, "colour": "red"},
    ]
    judge = {"scorers": [{"name": "x", "kind": "exact"}], "default_scorer": "y"}
    status, faults = checked(tmp_path, {"tiers": tiers, "judge": judge, "router": {"grpc_port": 70000}})
    assert status == 1
    of_fields = {"tiers[0].name", "tiers[0].workers", "tiers[1].threshold", "tiers[2].colour", "router.grpc_port"}
    assert set(faults) == of_fields
    tiers = [
        {"name": "first", "engine": "torch", "model": "nowhere", "threshold": 5},
        SMALL,
        {**LARGE, "engine": "torhc"},
    ]
    status, faults = checked(tmp_path, {"tiers": tiers, "judge": judge})
    assert status == 1
    assert set(faults) == {"tiers[0].model", "tiers[2].engine", "judge.default_scorer"}


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
    path.write_text(yaml.safe_dump({"tiers": [{**SMALL, "worker": 2}, {**LARGE, "workers": -1}]}))
    done = penstock("check", str(path))
    assert done.returncode == 1
    assert [line.removeprefix(f"{path}: ").partition(": ")[0] for line in done.stderr.splitlines()] == [
        "tiers[0].worker",
        "tiers[1].workers",
    ]
    nowhere = penstock("check", str(tmp_path / "none.yaml"))
    assert (nowhere.returncode, nowhere.stderr) == (1, f"{tmp_path / 'none.yaml'}: No such file or directory\n")


def test_the_version_is_printed() -> None:
    done = penstock("--version")
    assert (done.returncode, done.stdout) == (0, f"penstock {__version__}\n")


def test_a_gguf_file_is_served_by_llama_cpp_if_it_can_be(tmp_path: Path) -> None:
    """By the header alone: the file names an architecture, and tensors are not read."""
    write_gguf(FAMILY / "small", tmp_path / "good.gguf")
    write_gguf(FAMILY / "small", tmp_path / "unknown.gguf", general__architecture="alpaca")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "good.gguf").read_bytes()[:3000])
    tier = {"name": "only", "model": "good.gguf"}
    assert checked(tmp_path, {"tiers": [tier]}) == (0, {})
    assert MeshFile.model_validate({"tiers": [tier]}).tiers[0].served_name == "good"
    for more, field, problem in (
        ({"model": "unknown.gguf"}, "model", "unknown model architecture: 'alpaca'"),
        ({"model": "cut.gguf"}, "model", "cut off"),
        ({"engine": "torch"}, "model", "which engine: llamacpp serves"),
        ({"model": ".", "engine": "llamacpp"}, "model", "neither a GGUF file nor a folder with one"),
        ({"dtype": "float16"}, "dtype", "the llamacpp engine does not use it"),
        ({"device": "xpu"}, "device", "cpu or cuda"),
    ):
        _, problems = checked(tmp_path, {"tiers": [{**tier, **more}]})
        assert list(problems) == [f"tiers[0].{field}"]
        assert problem in problems[f"tiers[0].{field}"]
    other = {"tiers": [{**tier, "llamacpp": {"library": str(tmp_path / "none.so")}}]}
    assert "no file" in report_of(tmp_path, other, "--here")[1]["tiers[0].llamacpp.library"]


def test_it_says_how_answers_of_endpoints_are_judged_and_what_that_costs(tmp_path: Path) -> None:
    """Four lines are sound. What endpoints give is not known before they are asked."""
    path = tmp_path / "mesh.yaml"
    tiers = [REMOTE | {"name": "small", "threshold": 70}, REMOTE | {"name": "large"}]
    assert report_of(tmp_path, {"tiers": tiers})[:2] == (0, {})
    (line,) = json.loads(penstock("check", str(path), "--json").stdout)["judging"]
    assert "with log-probabilities are judged by their log-probabilities" in line
    assert "a call of large that reads prompt and answer and writes at most 4 tokens" in line
    report_of(tmp_path, {"tiers": tiers, "judge": judged(kind="consistency", samples=3)})
    (line,) = json.loads(penstock("check", str(path), "--json").stdout)["judging"]
    report_of(tmp_path, {"tiers": tiers, "judge": judged(kind="confidence")})
    assert [*judging(load_mesh_file(path), {"small": False})][1:] == [
        "answers of small come without the log-probabilities that x needs: all escalate"
    ]
    assert "x: 3 further answers of the same tier, of at most 512 tokens each" in line


def test_a_judge_that_is_not_calibrated_is_a_note_and_refused_where_that_is_strict(tmp_path: Path) -> None:
    """With a calibration it is none; nor is there one where no answer is judged."""
    mesh = {"tiers": [SMALL, LARGE]}
    status, problems, notes = report_of(tmp_path, mesh)
    assert (status, problems, [*notes]) == (0, {}, ["judge"])
    assert "penstock.judge_service.calibrate --scorer default" in notes["judge"]
    assert penstock("check", tmp_path / "mesh.yaml", "--strict").returncode == 1
    (tmp_path / "calibration.json").write_text("{}")
    for sound in (mesh | {"judge": {"calibration": "calibration.json"}}, {"tiers": [LARGE]}):
        assert report_of(tmp_path, sound, "--strict") == (0, {}, {})
    status, problems, _ = report_of(tmp_path, mesh | {"judge": {"calibration": "x", **judged(kind="confidence")}})
    assert status == 1
    assert "one of `scorers`" in problems["judge"]
