"""Meshes and clients of the router's tests."""

from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from tests.conftest import write_mesh_file
from tests.support.mesh import TestMesh, running_mesh
from tests.support.services import RedisProcess


@pytest.fixture(scope="module")
async def mesh(
    request: pytest.FixtureRequest, redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TestMesh]:
    """One mesh for all tests of a module: its MESH, the arguments of `write_mesh_file`, with so many ROUTERS."""
    path = write_mesh_file(tmp_path_factory.mktemp("mesh"), **getattr(request.module, "MESH", {}))
    async with running_mesh(path, redis.url, routers=getattr(request.module, "ROUTERS", 1)) as running:
        yield running


@pytest.fixture
async def client(mesh: TestMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.http}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
async def session(mesh: TestMesh) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(mesh.http, timeout=aiohttp.ClientTimeout(total=120)) as opened:
        yield opened
