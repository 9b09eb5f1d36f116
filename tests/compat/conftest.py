"""A mesh of shipped models for other projects' clients; once more with SGLang as its engine, where that is tested."""

from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.conftest import FAMILY, write_mesh_file
from tests.support.mesh import running_mesh
from tests.support.services import RedisProcess
from tests.support.sglang import SglangServers, cpu_shape


@dataclass(frozen=True)
class CompatMesh:
    """url: of the API, with /v1. chat: the first tier. tools: the last one, to which what is no valid call escalates."""

    url: str
    chat: str = "small"
    tools: str = "large"


@pytest.fixture(scope="package", params=["torch", pytest.param("sglang", marks=pytest.mark.sglang)])
async def mesh(
    request: pytest.FixtureRequest, redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[CompatMesh]:
    folder = tmp_path_factory.mktemp("compat")
    with closing(SglangServers(folder)) as servers:
        tiers = [await _tier(request.param, name, servers) for name in (CompatMesh.chat, CompatMesh.tools)]
        router = {"grpc_port": 0, "http_port": 0, "heartbeat_s": 0.1}
        path = write_mesh_file(folder, [tiers[0] | {"threshold": 0}, tiers[1]], router=router)
        async with running_mesh(path, redis.url) as running:
            yield CompatMesh(f"{running.http}/v1")


@pytest.fixture
async def client(mesh: CompatMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=mesh.url, api_key="unused", max_retries=0) as made:
        yield made


async def _tier(engine: str, name: str, servers: SglangServers) -> dict[str, Any]:
    """A shipped model, on the engine that is asked for."""
    tier: dict[str, Any] = {"name": name, "model": str(FAMILY / name), "engine": engine}
    if engine == "torch":
        return tier | {"kv_tokens": 8192}
    return tier | {
        "sglang": {"endpoint": await servers.url(cpu_shape(FAMILY / name, kv_tokens=8192, structured_output=True))}
    }
