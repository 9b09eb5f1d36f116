"""Whatever is sent to a mesh, it is answered in order, and nobody else is harmed; the benchmark `malformed` sends more."""

from collections.abc import AsyncIterator

import pytest

from benchmarks.malformed import compressed, malformed, running
from penstock.local.mesh import LocalMesh

pytestmark = pytest.mark.slow

REQUESTS = 500


@pytest.fixture(scope="module")
async def mesh() -> AsyncIterator[LocalMesh]:
    async with running() as started:
        yield started


@pytest.mark.timeout(1_800)
async def test_malformed_requests_harm_nobody(mesh: LocalMesh) -> None:
    figures = await malformed(mesh, REQUESTS)
    assert figures["wrong"] == []
    assert figures["ended"] == []
    assert figures["probe"]["errors"] == []
    refused = ("4", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED")
    answers = {what.rpartition(" ")[2]: 0 for what in figures["answers"]}
    for what, count in figures["answers"].items():
        answers[what.rpartition(" ")[2]] += count
    assert sum(count for answer, count in answers.items() if answer.startswith(refused)) > 0.6 * REQUESTS


async def test_bodies_that_grow_are_refused_and_a_router_stays_alive(mesh: LocalMesh) -> None:
    figures = await compressed(mesh, seconds=2.0)
    assert set(figures["answers"]) == {413}
    assert figures["livez"]["errors"] == []
