"""What the client makes of a server's stream, where no real server can be told to send it. Needs no SGLang."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from worker_service.engine.sglang.client import SglangClient


@asynccontextmanager
async def client_of(app: web.Application) -> AsyncIterator[SglangClient]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = SglangClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


async def test_a_reply_is_whole_though_its_stream_does_not_end() -> None:
    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for tokens, finish in (([5], None), ([5, 6], {"type": "length"})):
            meta = {"completion_tokens": len(tokens), "finish_reason": finish}
            await response.write(b"data: " + json.dumps({"output_ids": tokens, "meta_info": meta}).encode() + b"\n\n")
        await asyncio.Event().wait()  # the connection stays open
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with client_of(app) as client:
        pieces = [piece async for piece in client.generate("late", [1, 2], {})]
    assert [piece.token_ids for piece in pieces] == [[5], [6]]
    assert [piece.finish for piece in pieces] == [None, "length"]
