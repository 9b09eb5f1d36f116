"""Streams over HTTP that wait in the admission queue: headers and a comment at once, and then the reply or its error."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from penstock import Event, Tokens
from tests.conftest import MeshRunner
from tests.support.held_engine import held_engines
from tests.support.mesh import TestMesh


@pytest.fixture
async def mesh(run_mesh: MeshRunner, request: pytest.FixtureRequest) -> AsyncIterator[TestMesh]:
    """One request at a time. Heartbeats are so rare that no test meets one. The parameter: the deadline over HTTP, in s."""
    router = {"heartbeat_s": 600.0, "max_active": 1, "max_waiting": 1}
    router["default_deadline_s"] = getattr(request, "param", 600.0)
    async with run_mesh([{"name": "only", "model": "s"}], judge={"replicas": 0}, router=router) as running:
        yield running


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "only", "messages": [{"role": "user", "content": "hello"}], "stream": True} | fields


@asynccontextmanager
async def running_reply(mesh: TestMesh) -> AsyncIterator["asyncio.Task[list[Event]]"]:
    """A reply that holds the router's only place until the engine proceeds; its deadline is the client's."""
    begun = asyncio.Event()
    async with mesh.client() as client:

        async def read() -> list[Event]:
            events = []
            async for event in client.stream("hello", max_tokens=8):
                events.append(event)
                if isinstance(event, Tokens):
                    begun.set()
            return events

        task = asyncio.create_task(read())
        await begun.wait()
        yield task
        await task


async def test_a_queued_stream_has_headers_and_a_comment_at_once(
    mesh: TestMesh, session: aiohttp.ClientSession
) -> None:
    """Then its reply is as usual. A request that is refused still has its own status."""
    with held_engines() as proceed:
        async with (
            running_reply(mesh) as first,
            session.post("/v1/chat/completions", json=body(max_tokens=8)) as response,
        ):
            assert response.status == 200
            assert await response.content.readuntil(b"\n\n") == b": waiting\n\n"
            assert not first.done()
            async with session.post("/v1/chat/completions", json=body()) as refused:
                assert refused.status == 429, "the queue is full"
            proceed.set()
            events = [event for event in (await response.text()).split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("mesh", [2.0], indirect=True)
async def test_a_deadline_that_passes_in_the_queue_is_an_error_event(
    mesh: TestMesh, session: aiohttp.ClientSession
) -> None:
    with held_engines() as proceed:
        async with running_reply(mesh):
            async with session.post("/v1/chat/completions", json=body()) as response:
                assert response.status == 200
                events = [event for event in (await response.text()).split("\n\n") if event]
            proceed.set()
    assert events[0] == ": waiting"
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


async def test_an_unknown_model_is_404_behind_the_queue_too(mesh: TestMesh, session: aiohttp.ClientSession) -> None:
    with held_engines() as proceed:
        async with running_reply(mesh), asyncio.TaskGroup() as group:

            async def ask() -> int:
                async with session.post("/v1/chat/completions", json=body(model="nothing")) as response:
                    return response.status

            asked = group.create_task(ask())
            await mesh.until(lambda status: status.waiting == 1)
            proceed.set()
        assert asked.result() == 404


@pytest.mark.parametrize("mesh", [2.0], indirect=True)
async def test_a_request_with_an_slo_keeps_its_status(mesh: TestMesh, session: aiohttp.ClientSession) -> None:
    """It may be declined, which its status says: there is no comment before the outcome is known."""
    with held_engines() as proceed:
        async with running_reply(mesh):
            slo = {"time_to_first_token_s": 60}
            async with session.post("/v1/chat/completions", json=body(slo=slo)) as response:
                assert response.status == 504
            proceed.set()
