"""Tiers passed over by predicted scores: real services, simulated engines."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncClient, Escalated
from penstock.services.domain.score_prediction import ScorePredictor, features
from penstock.services.field_problems import SettingsError
from penstock.services.mesh_check import check_mesh_file
from tests.conftest import write_mesh_file
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess

SLOW = {"overhead_ms": 4.0, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 1_000_000}
FAST = SLOW | {"overhead_ms": 0.2}
TIERS: list[dict[str, Any]] = [
    {"name": "small", "model": "s", "threshold": 0, "skip_below": 30, "simulated": FAST},
    {"name": "medium", "model": "m", "threshold": 0, "simulated": SLOW},
    {"name": "large", "model": "l", "simulated": FAST},
]


def mesh_with_predictor(folder: Path) -> Path:
    """A mesh file; the predictor expects 12 of the small tier for a prompt with the word `hard`, else 95."""
    feature = features("hard", 2**16)[0]
    predictor = ScorePredictor(("small",), 2**16, (3.0,), {feature: (-5.0,)}, 100, (1.0,))
    (folder / "predictor.json").write_text(predictor.to_json())
    return write_mesh_file(folder, TIERS, router={"score_predictor": "predictor.json"})


@pytest.fixture(scope="module")
async def mesh(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestMesh]:
    async with running_mesh(mesh_with_predictor(tmp_path_factory.mktemp("mesh")), redis.url) as mesh:
        yield mesh


async def escalations(client: AsyncClient, prompt: str, **options: Any) -> list[Escalated]:
    events = client.stream(prompt, temperature=0.0, max_tokens=5, **options)
    return [event async for event in events if isinstance(event, Escalated)]


async def test_a_tier_is_passed_over_for_prompts_it_would_answer_badly(mesh: TestMesh) -> None:
    """With an event that has the predicted score, and a metric. A tier that a request names answers anyway."""
    async with mesh.client() as client:
        (passed,) = await escalations(client, "hard")
        assert (passed.from_tier, passed.to_tier, passed.reason) == ("small", "medium", "predicted_score_low")
        assert passed.predicted_score is not None
        assert 11.0 < passed.predicted_score < 13.0
        assert not await escalations(client, "simple")
        assert not await escalations(client, "hard", model="small")
    page = await mesh.metrics()
    assert 'penstock_reason="predicted_score_low"' in page


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
    path, file = mesh_with_predictor(tmp_path), tmp_path / "predictor.json"
    file.unlink() if written is None else file.write_text(written)
    assert "router.score_predictor" in [problem.field for problem in check_mesh_file(path).problems]
    with pytest.raises(SettingsError, match=message):
        async with running_mesh(path, redis.url):
            pass
