"""A running reply is moved to another worker: real router, real workers, in the test's event loop.

While replies move, each step of a torch engine takes at least STEP_S: a reply of the small model is computed in a tenth of
a second otherwise, and has ended when the client, who reads it in the loop of router and workers, asks for its move.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock import AsyncClient, InstanceChanged, Move, NotFoundError, TierStarted, Tokens
from penstock.worker_service.engine.torch.runner import TorchRunner
from tests.conftest import FAMILY, MeshRunner
from tests.router.test_length_stages import prompts
from tests.support.held_engine import held_engines
from tests.support.mesh import TestMesh

STEP_S = 0.02
LONG: Any = {"temperature": 0.9, "max_tokens": 300, "ignore_eos": True}


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.slow), "simulated"])
async def mesh(request: pytest.FixtureRequest, run_mesh: MeshRunner) -> AsyncIterator[TestMesh]:
    model = str(FAMILY / "small") if request.param == "torch" else "sim"
    slow = {"overhead_ms": 3.0, "token_us": 0.0, "context_token_ns": 0.0, "reply_tokens": 10_000}
    tier = {"name": "only", "model": model, "engine": request.param, "workers": 2}
    if request.param == "simulated":
        tier["simulated"] = slow
    async with run_mesh([tier]) as running:
        yield running


class Stream:
    """Reads a reply, checks its offsets, and moves it to and fro after so many tokens each."""

    def __init__(self, client: AsyncClient, prompt: str, number: int, moves_at: tuple[int, ...]) -> None:
        self._client, self._prompt, self._name, self._moves_at = client, prompt, f"request-{number}", moves_at
        self.text, self.tokens, self.instance = "", 0, ""
        self.changes: list[InstanceChanged] = []
        self.moves: list[asyncio.Task[Move]] = []

    async def run(self) -> "Stream":
        stream = self._client.stream(self._prompt, **LONG, seed=3, request_id=self._name)
        async for event in stream:
            match event:
                case TierStarted():
                    self.instance = event.instance_id
                case InstanceChanged():
                    assert (event.from_instance_id, event.offset) == (self.instance, self.tokens)
                    assert event.reason == "asked for"
                    self.instance = event.to_instance_id
                    self.changes.append(event)
                case Tokens():
                    assert event.offset == self.tokens
                    self.tokens += len(event.token_ids)
                    self.text += event.text
                    due = len(self.moves) < len(self._moves_at) and self.tokens >= self._moves_at[len(self.moves)]
                    if due and all(move.done() for move in self.moves):
                        other = {"worker-only-0": "worker-only-1", "worker-only-1": "worker-only-0"}[self.instance]
                        self.moves.append(asyncio.create_task(self._client.move(self._name, other)))
        return self


async def test_replies_move_to_and_fro_and_clients_see_one_reply(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        still = await asyncio.gather(*(Stream(client, p, i, ()).run() for i, p in enumerate(prompts())))
        streams = [Stream(client, p, i, (20, 80, 140)) for i, p in enumerate(prompts())]
        with held_engines(runners=(TorchRunner,), step_s=STEP_S):
            moved = await asyncio.gather(*(stream.run() for stream in streams))
        assert [s.text for s in moved] == [s.text for s in still]
        ended = await asyncio.gather(*(move for stream in moved for move in stream.moves), return_exceptions=True)
        assert all(isinstance(move, Move | NotFoundError) for move in ended), "the latter: its reply had ended"
        outcomes = [move for move in ended if isinstance(move, Move)]
        done = [move for move in outcomes if move.refusal is None]
        assert len(done) >= len(prompts()), [move.refusal for move in outcomes]
        assert all(move.sent_bytes > 0 or move.offset for move in done)
        assert sum(len(s.changes) for s in moved) == len(done)
        assert (await client.status()).failovers == 0


async def test_a_move_that_makes_no_sense_is_refused_and_costs_nothing(mesh: TestMesh) -> None:
    async with mesh.client() as client:
        with pytest.raises(NotFoundError, match="worker"):
            await client.move("request-0", "nobody")
        with pytest.raises(NotFoundError, match="active reply"):
            await client.move("request-0", "worker-only-0")
        started: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def read() -> int:
            tokens = 0
            async for event in client.stream(prompts()[0], max_tokens=300, request_id="request-0"):
                if isinstance(event, TierStarted):
                    started.set_result(event.instance_id)
                if isinstance(event, Tokens):
                    tokens += len(event.token_ids)
            return tokens

        reading = asyncio.create_task(read())
        assert (await client.move("request-0", await started)).refusal == "it is there already"
        assert await reading > 1
