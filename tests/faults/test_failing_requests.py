"""A request that no engine can compute ends with its error; the mesh and everybody else's replies go on."""

import asyncio
from typing import Any

import grpc
import pytest

from penstock import PenstockError
from penstock.worker_service.engine.simulated.engine import SimulatedRunner
from tests.conftest import MeshFileMaker
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess

BELL = 7  # a character, and its token, that only the bad prompts have


async def test_a_bad_request_is_tried_at_one_instance_and_costs_nobody_else_anything(
    redis: RedisProcess, mesh_file: MeshFileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers, eight bad requests amid others: each is tried once, and the other texts are the usual ones."""
    tiers: list[dict[str, Any]] = [{"name": "only", "model": "sim", "workers": 3}]
    questions = [f"What is {i} + 30?" for i in range(12)]
    tried: set[tuple[int, bytes]] = set()
    run = SimulatedRunner.run

    def failing(runner: SimulatedRunner, rows: Any) -> Any:
        if bad := [row for row in rows if BELL in row.tokens]:
            tried.update((id(runner), bytes(row.tokens)) for row in bad)
            raise RuntimeError("cannot be computed")
        return run(runner, rows)

    async with running_mesh(mesh_file(tiers), redis.url) as mesh, mesh.client() as client:
        usual = [(await client.generate(question, temperature=0)).text for question in questions]
        monkeypatch.setattr(SimulatedRunner, "run", failing)
        replies = await asyncio.gather(
            *(client.generate(question, temperature=0) for question in questions),
            *(client.generate(f"{chr(BELL)} {i}", temperature=0) for i in range(8)),
            return_exceptions=True,
        )
        assert [reply.text for reply in replies[:12] if not isinstance(reply, BaseException)] == usual
        for error in replies[12:]:
            assert isinstance(error, PenstockError)
            assert error.code is grpc.StatusCode.FAILED_PRECONDITION
            assert error.reason == "REQUEST_FAILED"
        assert len(tried) == 8
        assert (await client.generate(questions[0], temperature=0)).text == usual[0]
