"""An overloaded judge does not feed itself: decisions without it are quick, and it is given less to do, not more."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock import Escalated
from penstock.judge_service.scorers.confidence import ConfidenceScorer
from penstock.judge_service.scoring.interface import RawScore
from penstock.router_service.clients import judge_client
from penstock.router_service.clients.judge_client import TIMEOUTS_TO_OPEN, JudgeClient
from penstock.types.judging import JudgedAnswer
from tests.conftest import MeshFileMaker
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess

REQUESTS = 24


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_every_request_is_answered_while_the_judge_hangs(
    concurrency: int, redis: RedisProcess, mesh_file: MeshFileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the largest tier, as the plan says. After a few time-outs the judge is not asked any more."""
    asked = under_way = most = 0
    ask = JudgeClient._ask_in_turn

    async def hang(self: ConfidenceScorer, answers: Sequence[JudgedAnswer]) -> list[RawScore]:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        raise AssertionError

    async def counted(self: JudgeClient, *arguments: Any) -> Any:
        """At the router: a busy judge may notice only later that its caller has gone."""
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await ask(self, *arguments)
        finally:
            under_way -= 1

    router: dict[str, Any] = {"judge_timeout_s": 1.0, "judge_concurrency": concurrency, "judge_open_s": 3600.0}
    monkeypatch.setattr(judge_client, "MAX_OPEN_S", 3600.0)
    file = mesh_file(router={"grpc_port": 0, "http_port": 0, **router})
    async with running_mesh(file, redis.url) as mesh, mesh.client() as client:
        monkeypatch.setattr(ConfidenceScorer, "score", hang)
        monkeypatch.setattr(JudgeClient, "_ask_in_turn", counted)
        for wave in range(TIMEOUTS_TO_OPEN + 1):
            before = asked
            replies = await asyncio.gather(
                *(client.generate(f"What is {i} + {wave}?", temperature=0) for i in range(REQUESTS))
            )
            assert [reply.text != "" and reply.tier for reply in replies] == ["large"] * REQUESTS
            assert most <= concurrency
        assert asked == before > 0
        events = [event async for event in client.stream("What is 9 + 1?", temperature=0)]
        assert [event.reason for event in events if isinstance(event, Escalated)] == ["judge_unavailable"]
        assert under_way == 0
