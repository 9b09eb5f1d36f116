"""What clients choose never becomes a metric's label."""

import asyncio
import re
import urllib.request

import aiohttp

from penstock import NotFoundError
from services.testing import RedisProcess
from tests.conftest import MeshFileMaker
from tests.support.mesh import TestMesh, running_mesh


def series(mesh: TestMesh) -> list[str]:
    """Every series of the router that has a model's name."""
    with urllib.request.urlopen(f"http://{mesh.router.telemetry.metrics_address}/metrics", timeout=60) as answer:
        return [line for line in answer.read().decode().splitlines() if "gen_ai_request_model=" in line]


async def test_names_of_no_model_share_one_label(redis: RedisProcess, mesh_file: MeshFileMaker) -> None:
    """Three hundred bogus names make no more series than one does; the plan's models keep theirs."""
    async with (
        running_mesh(mesh_file(), redis.url) as mesh,
        mesh.client() as client,
        aiohttp.ClientSession() as session,
    ):

        async def ask_http(name: str) -> int:
            body = {"model": name, "messages": [{"role": "user", "content": "x"}]}
            async with session.post(f"{mesh.http}/v1/chat/completions", json=body) as response:
                return response.status

        async def ask_grpc(name: str) -> int:
            try:
                await client.generate("x", model=name, max_tokens=2)
            except NotFoundError:
                return 404
            return 200

        assert await ask_http("nobody") == 404
        first = await asyncio.to_thread(series, mesh)
        for begin in range(0, 300, 100):
            names = [f"bogus-{i}" for i in range(begin, begin + 100)]
            assert {*await asyncio.gather(*(ask_http(n) if i % 2 else ask_grpc(n) for i, n in enumerate(names)))} == {
                404
            }
        assert len(await asyncio.to_thread(series, mesh)) == len(first) > 0
        assert await ask_grpc("small") == 200
        assert await ask_grpc("cascade") == 200
        labels = {
            re.findall(r'gen_ai_request_model="([^"]*)"', line)[0] for line in await asyncio.to_thread(series, mesh)
        }
    assert labels == {"unknown", "small", "cascade"}
