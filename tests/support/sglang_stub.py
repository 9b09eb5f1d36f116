"""A server that answers as SGLang's does, for engines around it that need no SGLang."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from penstock.worker_service.engine.sglang.engine import SglangEngine
from penstock.worker_service.engine.sglang.server_link import SglangEngineOptions
from tests.conftest import FAMILY
from tests.support.engines import started
from tests.support.local_http import served

LENGTH = 24


class Server:
    """Answers as SGLang does: each reply is `LENGTH` times the letter a, one token an event."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.abort_seen = asyncio.Event()
        self.info: dict[str, Any] = {"version": "0.5.23", "served_model_name": "small"}
        self.load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Yields its base URL."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        async with served(app) as url:
            yield url

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"max_req_input_len": 2000, "tp_size": 1, "pp_size": 1, **self.info})

    async def _loads(self, _: web.Request) -> web.Response:
        rank = {"max_total_num_tokens": 8192, "max_running_requests": 8, **self.load}
        return web.json_response({"loads": [rank]})

    async def abort(self, asked: web.Request) -> web.Response:
        self.aborted.append((await asked.json())["rid"])
        self.abort_seen.set()
        return web.Response()

    async def generate(self, asked: web.Request) -> web.StreamResponse:
        self.asked.append(await asked.json())
        response = web.StreamResponse()
        await response.prepare(asked)
        for count in range(1, LENGTH + 1):
            await self.write(response, [97] * count, {"type": "length"} if count == LENGTH else None)
        return response

    async def write(self, response: web.StreamResponse, tokens: list[int], finish: dict[str, str] | None) -> None:
        """One event of a reply: all its tokens so far."""
        event = {"output_ids": tokens, "meta_info": {"completion_tokens": len(tokens), "finish_reason": finish}}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def attached(server: Server, **options: Any) -> AsyncIterator[SglangEngine]:
    """An engine of the small model, attached to this server."""
    async with server.serving() as endpoint:
        engine = SglangEngine(SglangEngineOptions(FAMILY / "small", "small", endpoint=endpoint, **options))
        async with started(engine):
            yield engine
