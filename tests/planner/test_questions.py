"""Planning questions: one file, the same plan whoever asks, and every unsound field named."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from google.protobuf.json_format import MessageToDict
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from penstock import AsyncPlannerClient, CascadePlan, FileError, PlanningQuestion, load_question
from penstock.cli.main import app
from penstock.mapper import from_message, to_message
from penstock.planner_service.api import plans
from penstock.planner_service.codecs.plan_file import plan_from_json, plan_to_json
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.proto.planner.v1 import planner_pb2_grpc
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.instances import Role
from penstock.types.planning import PlanOptions
from penstock.types.ranges import Within
from penstock.types.rules import RuleOptions
from tests.conftest import ROOT
from tests.support.mesh import COMPOSE
from tests.support.present import present
from tests.support.questions import question
from tests.support.services import RedisProcess, serving
from tests.support.tables import judged_header, write_table, write_trace

EXAMPLES = ROOT / "examples"


def small_question(folder: Path, **fields: Any) -> Path:
    """A question file about two tiers on four GPUs, with files of its own, and nothing but a target."""
    rng = np.random.default_rng(2)
    write_trace(folder / "trace.csv", ((i / 4, 100, 50) for i in range(60)))
    rows = ((50 + i, 40 + i % 9, rng.integers(20, 100), 60, 90) for i in range(60))
    write_table(folder / "judged.csv", judged_header(("small", "large")), rows)
    (folder / "cluster.yaml").write_text(yaml.safe_dump({"gpu": "h100", "nodes": 1, "gpus_per_node": 4}))
    models = [{"name": "small", "model": "llama-3.1-8b"}, {"name": "large", "model": "llama-3.1-70b"}]
    files = {"cluster": "cluster.yaml", "models": {"tiers": models}, "trace": "trace.csv", "quality": "judged.csv"}
    path = folder / "question.yaml"
    path.write_text(yaml.safe_dump(files | {"min_quality": 80} | fields))
    return path


@pytest.mark.slow
async def test_a_question_gets_the_same_plan_whoever_asks(tmp_path: Path, redis: RedisProcess, mesh_file: Any) -> None:
    """Command, SDK and service, all with their defaults: every figure but the time that it took."""
    path = small_question(tmp_path)
    done = CliRunner().invoke(app, ["plan", "--question", str(path), "--json"])
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    assert written["inputs"]["runs"] == 5
    async with (
        serving(Role.PLANNER, COMPOSE[Role.PLANNER], mesh_file(), redis.url) as chassis,
        AsyncPlannerClient(chassis.admin_address) as client,
        aio.insecure_channel(chassis.admin_address) as channel,
    ):
        *_, of_sdk = [event async for event in client.plan_cascade(load_question(path))]
        message = to_message(load_question(path), pb.PlanningQuestion)
        stub: Any = planner_pb2_grpc.PlannerServiceStub(channel)
        *_, last = [event async for event in stub.PlanCascade(pb.PlanCascadeRequest(question=message))]
    assert isinstance(of_sdk, CascadePlan)
    of_service = from_message(last.plan, CascadePlan)
    of_command = plan_from_json(written, "standard output")
    plans = [
        MessageToDict(to_message(dataclasses.replace(plan, seconds=0.0, verdict="", next_step=None), pb.CascadePlan))
        for plan in (of_command, of_sdk, of_service)
    ]
    assert plans[0] == plans[1] == plans[2]
    latency = present(of_sdk.latency)
    assert (latency.objective, latency.percentile) == ("end-to-end", 95)


def test_a_new_question_has_every_field_with_its_default(tmp_path: Path) -> None:
    """What `plan new` writes loads as the target alone; with all lines in force, every field of the message is said."""
    path = small_question(tmp_path)
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(yaml.safe_load(path.read_text())["models"]))
    done = CliRunner().invoke(app, ["plan", "new", str(tmp_path / "new.yaml")])
    assert done.exit_code == 0, done.output
    usual = load_question(tmp_path / "new.yaml")
    assert PlanOptions(min_quality=85, confidence=0.9) == PlanOptions(
        **{field.name: getattr(usual, field.name) for field in dataclasses.fields(PlanOptions)}
    )
    written = (tmp_path / "new.yaml").read_text().splitlines()[2:]
    lines = (line.removeprefix("# ") for line in written if ": " in line or line == "# rules:")
    every = yaml.safe_load("\n".join(lines))
    assert set(every) == {field.name for field in dataclasses.fields(PlanningQuestion)}
    assert set(every["rules"]) == {field.name for field in dataclasses.fields(RuleOptions)}
    assert CliRunner().invoke(app, ["plan", "new", str(tmp_path / "new.yaml")]).exit_code == 2, "it is not overwritten"


def test_files_of_examples_are_read_as_the_message_has_them(tmp_path: Path) -> None:
    """Short forms and paths come to the same as the JSON form of the message."""
    path = tmp_path / "question.yaml"
    names = {"cluster": "cluster-three-types.yaml", "models": "qwen2.5-cascade.yaml", "quality": "judged.csv"}
    files = {name: str(EXAMPLES / file) for name, file in names.items()} | {"trace": str(EXAMPLES / "trace.csv")}
    path.write_text(yaml.safe_dump(files | {"goal": "cost", "objective": "first-token", "max_latency_s": 2}))
    short = load_question(path, min_quality=85, gpus=4)
    assert (short.goal, short.objective, short.min_quality, short.gpus) == ("cost", "first-token", 85, 4)
    whole = MessageToDict(to_message(short, pb.PlanningQuestion), preserving_proto_field_name=True)
    path.write_text(yaml.safe_dump(whole | {"goal": "cost", "objective": "first_token"}))
    assert load_question(path) == short


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"goals": "cost"}, "goals: there is no such field"),
        ({"goal": "speed"}, "goal: must be latency or quality or cost or rate, not speed"),
        ({"gpus": "many"}, "gpus"),
        ({"rules": {"skips": True}}, r"rules\.skips: there is no such field"),
        ({"models": {"tiers": [{"name": "small", "model": 7}]}}, r"models: tiers\[0\]\.model: must be fields"),
        ({"trace": None}, "trace missing"),
        ({"trace": "none.csv"}, r"none\.csv"),
    ],
)
def test_what_a_file_cannot_say_is_named_with_the_file(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    path = small_question(tmp_path, **fields)
    with pytest.raises(FileError, match=problem):
        load_question(path)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("cluster.types[0].gpu.name", "h900", "cluster.types[0].gpu"),
        ("cluster.types[0].gpu.name", "", "cluster.types[0].gpu"),
        ("cluster.types[0].gpu.memory_gb", 80.0, "cluster.types[0].gpu.memory_gb_per_s"),
        ("cluster.types[0].nodes", 0, "cluster.types[0].nodes"),
        ("cluster.types[0].node_link_gb_per_s", float("nan"), "cluster.types[0].node_link_gb_per_s"),
        ("models.tiers[1].model.name", "gpt-9", "models.tiers[1].model"),
        ("models.tiers[1].model.layers", 3, "models.tiers[1].model.hidden"),
        ("models.tiers[1].name", "small", "models.tiers[1].name"),
        ("models.judge_s", -1.0, "models.judge_s"),
        ("models.runtime.memory_share", 2.0, "models.runtime.memory_share"),
        ("trace.arrival_s[3]", float("inf"), "trace.arrival_s[3]"),
        ("trace.output_tokens[7]", 0, "trace.output_tokens[7]"),
        ("trace.input_tokens", (5,), "trace.input_tokens"),
        ("trace.cached_tokens", (5,), "trace.cached_tokens"),
        ("trace.cached_tokens", (99,) * 9 + (100,) * 291, "trace.cached_tokens[9]"),
        ("trace.arrival_s", (), "trace.arrival_s"),
        ("quality.prompts", (), "quality.prompts"),
        ("quality.prompts[2].judge_scores[1]", 101.0, "quality.prompts[2].judge_scores[1]"),
        ("quality.prompts[3].predicted_scores", (5.0,), "quality.prompts[3].predicted_scores"),
        ("quality.prompts[3].predicted_scores", (5.0, 5.0, 5.0), "quality.prompts[3].predicted_scores"),
        ("quality.prompts[4].output_tokens", (5, 5), "quality.prompts[4].output_tokens"),
        ("min_quality", None, "target"),
        ("min_quality", -5.0, "min_quality"),
        ("min_quality", 100.5, "min_quality"),
        ("min_quality", float("nan"), "min_quality"),
        ("max_latency_s", 0.0, "max_latency_s"),
        ("max_latency_s", float("inf"), "max_latency_s"),
        ("percentile", 40.0, "percentile"),
        ("percentile", 100.0, "percentile"),
        ("confidence", 0.4, "confidence"),
        ("confidence", 1.0, "confidence"),
        ("max_utilisation", 0.0, "max_utilisation"),
        ("max_utilisation", 1.5, "max_utilisation"),
        ("runs", 101, "runs"),
        ("rate", -1.0, "rate"),
        ("requests", 0, "requests"),
        ("requests", 301, "requests"),
        ("gpus", 0, "gpus"),
    ],
)
def test_every_unsound_field_is_named_as_the_question_has_it(path: str, value: Any, field: str) -> None:
    """By whoever is asked: all call this."""
    with pytest.raises(InvalidRequest) as caught:
        plans.plan(_with(question(min_quality=80), path.replace("[", ".").replace("]", "").split("."), value))
    assert field in [problem.field for problem in caught.value.problems]


def _with(whole: Any, path: list[str], value: Any) -> Any:
    """The value with another part."""
    if not path:
        return value
    name, *rest = path
    if name.isdecimal():
        return (*whole[: int(name)], _with(whole[int(name)], rest, value), *whole[int(name) + 1 :])
    return dataclasses.replace(whole, **{name: _with(getattr(whole, name), rest, value)})


@given(st.floats(0, 100), st.booleans(), st.booleans(), st.floats(0, 200))
def test_a_range_is_what_it_says(most: float, above: bool, below: bool, value: float) -> None:
    within = Within(0, most, above=above, below=below)
    inside = 0 <= value <= most and not (above and value == 0) and not (below and value == most)
    assert within.holds(value) == inside
    assert not within.holds(float("nan"))


def test_plan_files_come_back_as_they_went() -> None:
    """Of a plan with all that it may have, but for the comparison; of an earlier version, without what it did not say."""
    plan = plans.plan(question(min_quality=75, max_tiers=2, allow_overload=False)).report()
    content = json.loads(json.dumps(plan_to_json(plan)))
    sent = to_message(plan, pb.CascadePlan)
    assert to_message(plan_from_json(content, "plan"), pb.CascadePlan) == sent
    for name in ("best_answer", "cached_share", "user_latency_s"):
        del content[name]
    old = plan_from_json(content | {"budget": "exact"}, "plan")
    assert (old.best_answer, old.user_latency_s) == (False, None)
    for name, value in (("thresholds", [5]), ("best_answer", "yes"), ("tiers", 5)):
        with pytest.raises((FileError, KeyError, TypeError)):
            plan_from_json(content | {name: value if name != "thresholds" else [5, 5, 5]}, "plan")
