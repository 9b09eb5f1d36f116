"""Tiers passed over by predicted scores, and answers rejected before they are finished: real services, simulated engines."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import AsyncClient, AsyncPlannerClient, Escalated
from penstock.client.plans import EarlyCheck
from penstock.router_service.generation.cascade_generation import UNSTREAMED_INTERVAL_S
from penstock.router_service.generation.early_rejection import EARLY_INTERVAL_S, EarlyCheckCounter
from penstock.router_service.generation.tier_generation import TierGeneration
from penstock.services.domain.score_prediction import ScorePredictor, features
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_check import check_mesh_file
from penstock.types.requests import GenerationRequest
from tests.router.test_flagged_answers import metrics_page
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess

LENGTH = 400
SLOW = {"overhead_ms": 4.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}
FAST = SLOW | {"overhead_ms": 0.2}
TIERS: list[dict[str, Any]] = [
    {"name": "small", "threshold": 0, "skip_below": 30, "simulated": FAST},
    {"name": "medium", "threshold": 0, "simulated": SLOW},
    {"name": "large", "simulated": FAST},
]


def content(folder: Path) -> dict[str, Any]:
    """A mesh file; the predictor expects 12 of the small tier for a prompt with the word `hard`, else 95."""
    feature = features("hard", 2**16)[0]
    predictor = ScorePredictor(("small",), 2**16, (3.0,), {feature: (-5.0,)}, 100, (1.0,))
    (folder / "predictor.json").write_text(predictor.to_json())
    return {
        "name": "skipping",
        "tiers": [{"engine": "simulated", "model": f"sim-{tier['name']}"} | tier for tier in TIERS],
        "judge": {"scorers": [{"name": "confidence", "kind": "confidence"}]},
        "router": {"grpc_port": 0, "http_port": 0, "score_predictor": "predictor.json"},
    }


@pytest.fixture(scope="module")
async def mesh(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestMesh]:
    folder = tmp_path_factory.mktemp("mesh")
    path = folder / "mesh.yaml"
    path.write_text(yaml.safe_dump(content(folder)))
    async with running_mesh(path, redis.url) as mesh:
        yield mesh


async def events(client: AsyncClient, prompt: str, **options: Any) -> list[Any]:
    return [event async for event in client.stream(prompt, temperature=0.0, **options)]


async def escalations(client: AsyncClient, prompt: str, **options: Any) -> list[Escalated]:
    return [event for event in await events(client, prompt, **options) if isinstance(event, Escalated)]


async def set_medium(mesh: TestMesh, client: AsyncClient, **fields: Any) -> None:
    """Publish a plan whose medium tier has other fields, and wait until the router has it."""
    async with AsyncPlannerClient(mesh.parts["planner-0"].admin_address) as planner:
        plan = await planner.get_plan()
        tiers = tuple(replace(tier, **fields) if tier.name == "medium" else tier for tier in plan.tiers)
        published = await planner.set_plan(replace(plan, tiers=tiers))
    assert published.tiers == tiers
    revision = published.revision
    while (await client.status()).plan_revision < revision:
        await asyncio.sleep(0.01)


async def test_a_tier_is_passed_over_for_prompts_it_would_answer_badly(mesh: TestMesh) -> None:
    """With an event that has the predicted score, and a metric. A tier that a request names answers anyway."""
    async with mesh.client() as client:
        (passed,) = await escalations(client, "hard", max_tokens=5)
        assert (passed.from_tier, passed.to_tier, passed.reason) == ("small", "medium", "predicted_score_low")
        assert passed.predicted_score is not None
        assert 11.0 < passed.predicted_score < 13.0
        assert not await escalations(client, "simple", max_tokens=5)
        assert not await escalations(client, "hard", max_tokens=5, model="small")
    page = await asyncio.to_thread(metrics_page, mesh)
    assert 'penstock_reason="predicted_score_low"' in page


async def test_an_unfinished_answer_that_scores_too_low_is_cancelled(mesh: TestMesh) -> None:
    """The request escalates long before the answer would have been complete, with the part as a draft."""
    async with mesh.client() as client:
        await set_medium(mesh, client, early_checks=(EarlyCheck(10, 100.0),))
        reply = await client.generate("hard", temperature=0.0, max_tokens=LENGTH)
        medium, large = reply.tiers
        assert (medium.tier, medium.accepted, medium.score_reason) == ("medium", False, "rejected_early")
        assert 10 <= medium.usage.output_tokens < LENGTH / 2
        assert (large.tier, large.usage.output_tokens) == ("large", LENGTH)
        assert large.usage.accepted_draft_tokens > 0
        (_, early) = await escalations(client, "hard", max_tokens=LENGTH)
        assert (early.from_tier, early.reason, early.predicted_score) == ("medium", "rejected_early", None)
        instance = next(i for i in (await client.status()).instances if i.tier == "medium")
        assert instance.running == 0, "cancelled at its worker"
    page = await asyncio.to_thread(metrics_page, mesh)
    lines = [line for line in page.splitlines() if line.startswith("penstock_router_early_checks_total{")]
    assert any('penstock_outcome="rejected"' in line and 'penstock_tier="medium"' in line for line in lines)


async def test_a_tier_that_a_request_names_is_not_checked_early(
    mesh: TestMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other tier could answer instead."""
    checked: list[str] = []
    monkeypatch.setattr(EarlyCheckCounter, "add", lambda _, tier, outcome: checked.append(f"{tier} {outcome}"))
    async with mesh.client() as client:
        await set_medium(mesh, client, early_checks=(EarlyCheck(10, 100.0),))
        reply = await client.generate("hard", model="medium", temperature=0.0, max_tokens=100)
    assert (reply.tier, reply.usage.output_tokens, checked) == ("medium", 100, [])


async def test_tokens_of_an_answer_that_is_checked_early_wait_less_for_others(
    mesh: TestMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another held answer wait longer, and those that are streamed do not wait."""
    intervals: dict[str, list[float | None]] = {}
    generate = TierGeneration.generate

    async def recorded(self: TierGeneration, tier: str, request: GenerationRequest, *rest: Any, **options: Any) -> Any:
        intervals.setdefault(tier, []).append(request.output_interval_s)
        return await generate(self, tier, request, *rest, **options)

    monkeypatch.setattr(TierGeneration, "generate", recorded)
    async with mesh.client() as client:
        await set_medium(mesh, client, threshold=100.0, early_checks=())
        await events(client, "simple", max_tokens=20)
        await events(client, "hard", max_tokens=20)
        await set_medium(mesh, client, threshold=0.0, early_checks=(EarlyCheck(10, 0.0),))
        await events(client, "hard", max_tokens=20)
    assert intervals == {"small": [None], "medium": [UNSTREAMED_INTERVAL_S, EARLY_INTERVAL_S], "large": [None]}


async def test_an_answer_that_passes_its_checks_is_generated_to_its_end(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        await set_medium(mesh, client, early_checks=(EarlyCheck(10, 0.0), EarlyCheck(60, 0.0)))
        reply = await client.generate("hard", temperature=0.0, max_tokens=100)
    assert (reply.tier, reply.usage.output_tokens) == ("medium", 100)


async def test_without_a_judge_no_answer_is_rejected_early(redis: RedisProcess, tmp_path: Path) -> None:
    """The judge is gone: the answer is generated to its end, and then follows the plan's policy."""
    mesh_content = content(tmp_path) | {"name": "skipping-no-judge", "planner": {"judge_unavailable": "accept"}}
    mesh_content["tiers"][1]["early_checks"] = [{"after_tokens": 10, "reject_below": 100}]
    mesh_content["router"]["judge_timeout_s"] = 1.0
    path = tmp_path / "mesh.yaml"
    path.write_text(yaml.safe_dump(mesh_content))
    async with running_mesh(path, redis.url) as mesh, mesh.client() as client:
        assert (await client.generate("hard", temperature=0.0, max_tokens=60)).tier == "large"
        await mesh.stop("judge-0")
        reply = await client.generate("hard", temperature=0.0, max_tokens=60)
        assert (reply.tier, reply.usage.output_tokens, reply.tiers[0].score_reason) == ("medium", 60, "")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "router.score_predictor: .*predictor.json"),
        ("{", "router.score_predictor: .*not JSON"),
        ('{"format": "penstock-score-predictor-1"}', "router.score_predictor: .*tiers"),
    ],
)
async def test_a_predictor_that_is_missing_or_corrupt_is_named_at_the_start(
    redis: RedisProcess, tmp_path: Path, written: str | None, message: str
) -> None:
    mesh_content = content(tmp_path)
    file, path = tmp_path / "predictor.json", tmp_path / "mesh.yaml"
    file.unlink() if written is None else file.write_text(written)
    path.write_text(yaml.safe_dump(mesh_content))
    assert "router.score_predictor" in [problem.field for problem in check_mesh_file(path).problems]
    with pytest.raises(SettingsError, match=message):
        async with running_mesh(path, redis.url):
            pass


def test_a_limit_needs_a_predictor_and_the_last_tier_has_neither(tmp_path: Path) -> None:
    mesh_content = content(tmp_path)
    path = tmp_path / "mesh.yaml"
    mesh_content["router"]["score_predictor"] = ""
    mesh_content["tiers"][2] |= {"skip_below": 10, "early_checks": [{"after_tokens": 5, "reject_below": 5}]}
    path.write_text(yaml.safe_dump(mesh_content))
    fields = [problem.field for problem in check_mesh_file(path).problems]
    assert {"tiers[0].skip_below", "tiers[2].skip_below", "tiers[2].early_checks"} <= set(fields)
