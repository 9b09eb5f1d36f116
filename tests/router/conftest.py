"""Meshes and clients of the router's tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import openai
import pytest

from penstock.router_service.clients.reply_multiplexer import MultiplexerPool
from penstock.services.channels import ChannelPool
from tests.support.mesh import TestMesh
from tests.support.routed_request import Router
from tests.support.tier_scene import Scene


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
