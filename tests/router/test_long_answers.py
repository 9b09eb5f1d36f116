"""Long answers that are accepted from a lower score on: real services, simulated engines."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock import AsyncClient, AsyncPlannerClient, Finished, InvalidRequestError, Judged, LongAnswers
from tests.conftest import MeshRunner
from tests.support.mesh import TestMesh

FAST = {"overhead_ms": 0.2, "token_us": 1.0, "context_token_ns": 0.0}
TIERS: list[dict[str, Any]] = [
    {
        "name": "small",
        "model": "s",
        "threshold": 100,
        "long_answers": {"from_tokens": 40, "threshold": 0.0},
        "simulated": FAST | {"reply_tokens": 1_000_000},
    },
    {"name": "large", "model": "l", "simulated": FAST},
]
MESH = {"tiers": TIERS, "judge": {"guards": []}}
"""The small tier accepts no answer by its score, and long ones always."""


async def judged(client: AsyncClient, tokens: int) -> tuple[Judged, list[str]]:
    """The verdict on the small tier's answer of so many tokens, and the tiers that answered."""
    events = [event async for event in client.stream("Say much.", temperature=0.0, max_tokens=tokens)]
    (verdict,) = (event for event in events if isinstance(event, Judged))
    (finished,) = (event for event in events if isinstance(event, Finished))
    return verdict, [tier.tier for tier in finished.tiers]


async def test_a_long_answer_stands_and_a_short_one_escalates(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        short, tiers = await judged(client, 39)
        assert (short.accepted, short.threshold, tiers) == (False, 100.0, ["small", "large"])
        long, tiers = await judged(client, 40)
        assert (long.accepted, long.threshold, tiers) == (True, 0.0, ["small"])


async def test_the_planner_publishes_the_rule_and_refuses_one_that_is_none(mesh: TestMesh) -> None:
    async with mesh.client() as client, AsyncPlannerClient(mesh.parts["planner-0"].admin_address) as planner:
        plan = await planner.get_plan()
        small, large = plan.tiers
        assert (small.long_answers, large.long_answers) == (LongAnswers(40, 0.0), None)
        for wrong, field in (
            ((replace(small, long_answers=LongAnswers(0, 0.0)), large), "plan.tiers[0].long_answers.from_tokens"),
            ((replace(small, long_answers=LongAnswers(4, 101.0)), large), "plan.tiers[0].long_answers.threshold"),
            ((small, replace(large, long_answers=LongAnswers(4, 1.0))), "plan.tiers[1].long_answers"),
        ):
            with pytest.raises(InvalidRequestError) as refused:
                await planner.set_plan(replace(plan, tiers=wrong))
            assert field in refused.value.fields
        changed = await planner.set_plan(
            replace(plan, tiers=(replace(small, long_answers=LongAnswers(60, 0.0)), large))
        )
        while (await client.status()).plan_revision < changed.revision:
            await asyncio.sleep(0.01)
        assert not (await judged(client, 59))[0].accepted
        assert (await judged(client, 60))[0].accepted


async def test_an_answer_that_was_cut_off_is_not_a_long_one(run_mesh: MeshRunner) -> None:
    """It has as many tokens as it may have, which says nothing of its worth: the judge's guard refuses it."""
    async with run_mesh(TIERS, judge={"guards": ["truncated"]}) as mesh, mesh.client() as client:
        verdict, tiers = await judged(client, 80)
        assert (verdict.accepted, verdict.reason, tiers) == (False, "truncated_answer", ["small", "large"])
