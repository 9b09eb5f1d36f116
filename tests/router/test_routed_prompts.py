"""Routing before generation from end to end: a predictor is trained, a plan chooses it, and routers send prompts so."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock import AsyncClient, Escalated, Finished, Tokens
from penstock.services.score_predictor_file import read_score_predictor
from penstock.types.events import Judged
from tests.conftest import write_mesh_file
from tests.support.cli import penstock
from tests.support.mesh import TestMesh, running_mesh
from tests.support.questions import asked
from tests.support.services import RedisProcess
from tests.support.tables import judged_header, write_table, write_trace

TIERS = ("small", "large")
MODELS = ("qwen2.5-14b", "qwen2.5-32b")
EASY, HARD = ("copy", "upper"), ("prove", "translate")
FAST = {"overhead_ms": 0.2, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}
PROMPTS, RATE_PER_S = 240, 120


def prompt(i: int) -> str:
    verb = (EASY, HARD)[i % 2][i // 2 % 2]
    return f"{verb} sentence number {i}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a predictor, and a plan for judged prompts of which the small model answers the easy half well."""
    folder, rng = tmp_path_factory.mktemp("routed"), np.random.default_rng(5)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt(i)}) + "\n" for i in range(PROMPTS)))
    rows = []
    for i in range(PROMPTS):
        scores = (20.0 if i % 2 else 90.0) + rng.normal(0, 5), 92.0 + rng.normal(0, 2)
        pairs = zip(rng.integers(60, 200, 2).tolist(), np.clip(scores, 0, 100).round(1).tolist(), strict=True)
        rows.append([100, *(value for pair in pairs for value in pair)])
    write_table(folder / "judged.csv", judged_header(TIERS), rows)
    write_trace(folder / "trace.csv", ([i / RATE_PER_S, 100, 100] for i in range(900)))
    (folder / "cluster.yaml").write_text(
        yaml.safe_dump({"gpu": "h100", "nodes": 1, "gpus_per_node": 8, "dollars_per_gpu_hour": 4.0})
    )
    tiers = [{"name": name, "model": model} for name, model in zip(TIERS, MODELS, strict=True)]
    (folder / "models.yaml").write_text(yaml.safe_dump({"tiers": tiers}))
    files = "prompts.jsonl", "judged.csv", "--out", "predictor.json", "--quality-out", "predicted.csv"
    run("predictor", *(one if one.startswith("--") else folder / one for one in files))
    inputs = {"cluster": "cluster.yaml", "models": "models.yaml", "trace": "trace.csv", "quality": "predicted.csv"}
    options = (part for name, file in inputs.items() for part in (f"--{name}", folder / file))
    run("plan", *options, "--min-quality", 85, *asked(runs=1), "--out", folder / "plan.json")
    return folder


def run(*arguments: Any) -> str:
    done = penstock(*arguments)
    assert done.returncode == 0, done.output
    return done.output


def mesh_of(folder: Path, **router: Any) -> Path:
    """A mesh file whose tiers serve the planned models by name."""
    tiers: list[dict[str, Any]] = [
        {"name": name, "model": f"sim-{name}", "served_model_name": model, "simulated": FAST}
        for name, model in zip(TIERS, MODELS, strict=True)
    ]
    tiers[0]["threshold"] = 80
    return write_mesh_file(folder, tiers, router=router)


@pytest.fixture(scope="module")
async def mesh(redis: RedisProcess, folder: Path) -> AsyncIterator[TestMesh]:
    async with running_mesh(mesh_of(folder, score_predictor="predictor.json"), redis.url) as mesh:
        yield mesh


def test_a_plan_says_that_it_routes_and_what_the_runner_up_takes(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["thresholds"] == [0.0]
    assert plan["skip_for"][0]["tier"] == "large"
    assert 2 < plan["skip_for"][0]["gain"] < 70
    assert plan["verdict"].startswith("small or large by a predictor, of 2 candidates; ")
    assert "; the runner-up, large, takes " in plan["verdict"]
    assert plan["cost"]["gpus"] < plan["candidates"]["runner_up"]["cost"]["gpus"]
    assert not plan["candidates"]["runner_up"]["routed"]
    assert plan["promise"]["least_quality"] >= 85
    simulated = json.loads(run("simulate", "--plan", folder / "plan.json", "--trace", folder / "trace.csv", "--json"))
    assert sum(tier["requests"] for tier in simulated["tiers"]) == simulated["requests"], "each goes to one tier"


async def test_routers_send_each_prompt_to_one_tier_and_judge_nothing(mesh: TestMesh, folder: Path) -> None:
    """By the gain of the plan, once it is applied; replies are streamed, also those of the small tier."""
    await asyncio.to_thread(run, "plan", "apply", folder / "plan.json", "-a", mesh.router.admin_address)
    gain = json.loads((folder / "plan.json").read_text())["skip_for"][0]["gain"]
    predictor = read_score_predictor(folder / "predictor.json")
    await mesh.until(lambda status: status.plan_revision > 1)
    async with mesh.client() as client:
        sent = [await replied(client, prompt(PROMPTS + i)) for i in range(12)]
    scores = [predictor.predict(prompt(PROMPTS + i)) for i in range(12)]
    expected = [each["large"] - each["small"] <= gain for each in scores]
    assert [tier == "small" for tier, _ in sent] == expected
    assert set(expected) == {True, False}
    for (tier, events), is_small in zip(sent, expected, strict=True):
        reasons = [event.reason for event in events if isinstance(event, Escalated)]
        assert reasons == ([] if is_small else ["predicted_score_low"])
        assert not [event for event in events if isinstance(event, Judged)], tier
        assert len([event for event in events if isinstance(event, Tokens)]) > 1, "not held"


async def replied(client: AsyncClient, text: str) -> tuple[str, list[Any]]:
    events = [event async for event in client.stream(text, temperature=0.0, max_tokens=200)]
    assert isinstance(events[-1], Finished)
    return events[-1].tier, events


async def test_a_mesh_without_a_predictor_refuses_the_plan(redis: RedisProcess, folder: Path) -> None:
    """Its first tier would be sent all prompts."""
    async with running_mesh(mesh_of(folder), redis.url) as mesh:
        admin = mesh.router.admin_address
        refused = await asyncio.to_thread(penstock, "plan", "apply", folder / "plan.json", "-a", admin)
    assert refused.returncode != 0
    assert "plan.tiers[0].skip_for" in refused.output
    assert "needs router.score_predictor" in refused.output


def test_manifests_of_the_plan_name_the_predictor(folder: Path) -> None:
    run("plan", "render", folder / "plan.json", "--to", "compose")
    mesh = yaml.safe_load((folder / "plan.mesh.yaml").read_text())
    plan = json.loads((folder / "plan.json").read_text())
    assert mesh["router"]["score_predictor"] == "/models/score_predictor.json"
    assert (mesh["tiers"][0]["threshold"], mesh["tiers"][0]["skip_for"]) == (0.0, plan["skip_for"][0])
