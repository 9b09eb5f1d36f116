"""Answers that no further tier can better are judged at their end where the mesh asks for it, and flagged if they are bad."""

from typing import Any

import aiohttp
import pytest

from penstock import Finished, Judged, Tokens
from penstock.router_service.generation.cascade import flagged
from tests.conftest import MeshRunner
from tests.support.mesh import TestMesh

ROUTER = {"judge_timeout_s": 60}
NEEDS_REFERENCE = {"scorers": [{"name": "exact", "kind": "exact"}], "default_scorer": "exact"}


async def events_of(mesh: TestMesh, **options: Any) -> tuple[str, list[Judged], Finished]:
    """(streamed text, judgements, end) of one request."""
    text, judged = "", list[Judged]()
    async with mesh.client() as client:
        async for event in client.stream("hello", **options):
            match event:
                case Tokens():
                    assert not judged or judged[-1].tier != event.tier or event.tier == "small"
                    text += event.text
                case Judged():
                    judged.append(event)
                case Finished():
                    return text, judged, event
    raise AssertionError("no end")


async def test_a_bad_answer_of_the_last_tier_is_flagged(run_mesh: MeshRunner) -> None:
    """Its tokens come before it is judged. Its client is told, over gRPC and HTTP, and it is counted; a good one is not."""
    async with run_mesh(router=ROUTER | {"flag_below": 0.001}) as mesh:
        text, (cut,), end = await events_of(mesh, model="large", max_tokens=3)
        assert text
        assert (cut.tier, cut.score, cut.threshold, cut.accepted) == ("large", 0, 0.001, True)
        assert (cut.flagged, cut.reason) == (True, "truncated_answer")
        assert [(t.flagged, t.score_reason, t.accepted) for t in end.tiers] == [(True, "truncated_answer", True)]
        _, (whole,), end = await events_of(mesh, model="large")
        assert (whole.flagged, whole.reason) == (False, "")
        assert whole.score is not None
        assert not end.tiers[0].flagged
        body = {"model": "large", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{mesh.http}/v1/chat/completions", json=body) as response,
        ):
            (tier,) = (await response.json())["penstock"]["tiers"]
        assert (tier["flagged"], tier["score_reason"]) == (True, "truncated_answer")
        page = await mesh.metrics()
    (line,) = [line for line in page.splitlines() if line.startswith("penstock_router_flagged_total{")]
    assert 'penstock_tier="large"' in line
    assert line.endswith(" 2.0")


async def test_without_the_setting_only_lower_tiers_are_judged(run_mesh: MeshRunner) -> None:
    """And a cut answer of a lower tier escalates, with its reason in the event."""
    async with run_mesh(router=ROUTER) as mesh:
        _, judged, end = await events_of(mesh, max_tokens=3)
    assert [(j.tier, j.score, j.reason, j.accepted, j.flagged) for j in judged] == [
        ("small", 0, "truncated_answer", False, False)
    ]
    assert [(t.tier, t.score, t.flagged) for t in end.tiers] == [("small", 0, False), ("large", None, False)]


async def test_an_answer_that_cannot_be_scored_is_not_flagged(run_mesh: MeshRunner) -> None:
    """Nor does it fail: its tokens have been sent."""
    async with run_mesh(router=ROUTER | {"flag_below": 50}, judge=NEEDS_REFERENCE) as mesh:
        text, (judged,), end = await events_of(mesh, model="large")
    assert text
    assert (judged.score, judged.flagged, judged.accepted) == (None, False, True)
    assert not end.tiers[0].flagged


@pytest.mark.parametrize(("score", "is_flagged"), [(None, False), (49.9, True), (50.0, False), (0.0, True)])
def test_scores_below_the_setting_are_flagged(score: float | None, is_flagged: bool) -> None:
    assert flagged(score, 50.0) is is_flagged
