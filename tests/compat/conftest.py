"""A mesh for other projects' clients: a shipped model answers, and a simulated one behind it takes tools and forms."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import yaml

from services.testing import RedisProcess
from tests.conftest import FAMILY
from tests.support.mesh import running_mesh


@dataclass(frozen=True)
class CompatMesh:
    """url: of the API, with /v1. chat: the tier of a shipped model. tools: the tier that takes tools and forms."""

    url: str
    chat: str = "small"
    tools: str = "simulated"


@pytest.fixture(scope="package")
async def mesh(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CompatMesh]:
    fast = {"overhead_ms": 0.5, "token_us": 1.0, "context_token_ns": 0.0, "reply_tokens": 12}
    content = {
        "name": "test-compat",
        "tiers": [
            {"name": "small", "model": str(FAMILY / "small"), "threshold": 0, "engine": "torch", "kv_tokens": 4096},
            {"name": "simulated", "model": "sim", "engine": "simulated", "simulated": fast},
        ],
        "judge": {"scorers": [{"name": "confidence", "kind": "confidence"}], "default_scorer": "confidence"},
        "router": {"grpc_port": 0, "http_port": 0, "heartbeat_s": 0.1},
    }
    path = tmp_path_factory.mktemp("compat") / "mesh.yaml"
    path.write_text(yaml.safe_dump(content))
    async with running_mesh(path, redis.url) as running:
        yield CompatMesh(f"{running.http}/v1")
