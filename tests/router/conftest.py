"""Meshes and clients of the router's tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import openai
import pytest

from penstock.router_service.clients.reply_multiplexer import MultiplexerPool
from penstock.services.channels import ChannelPool
from tests.conftest import write_mesh_file
from tests.support.mesh import TestMesh, running_mesh
from tests.support.routed_request import Router
from tests.support.services import RedisProcess
from tests.support.tier_scene import Scene


@pytest.fixture(scope="module")
async def mesh(
    request: pytest.FixtureRequest, redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TestMesh]:
    """One mesh for all tests of a module: its MESH, the arguments of `write_mesh_file`, with so many ROUTERS."""
    path = write_mesh_file(tmp_path_factory.mktemp("mesh"), **getattr(request.module, "MESH", {}))
    async with running_mesh(path, redis.url, routers=getattr(request.module, "ROUTERS", 1)) as running:
        yield running


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """Scripted workers of a tier, as one router sees them."""
    async with AsyncExitStack() as stack, asyncio.timeout(300):
        channels = await stack.enter_async_context(ChannelPool())
        sessions = await stack.enter_async_context(MultiplexerPool(channels))
        yield Scene(stack, channels, sessions)


@pytest.fixture
async def client(mesh: TestMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.http}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
async def session(mesh: TestMesh) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(mesh.http, timeout=aiohttp.ClientTimeout(total=120)) as opened:
        yield opened


@pytest.fixture
async def router(scene: Scene) -> AsyncIterator[Router]:
    async with AsyncExitStack() as stack:
        yield Router(scene, stack)
