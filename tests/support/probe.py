"""`python -m tests.support.probe KIND GRPC_ADDRESS HTTP_ADDRESS`: what a bystander feels, from a process of its own.

KIND `questions`: a short question every 50 ms, by gRPC and HTTP in turn; `livez`: `GET /livez` every 20 ms; `tokens`: one
reply after another, streamed, of which the gaps between tokens count. It prints a line once it has had its first answer, and
when its stdin ends another: {"latencies_s": [...], "errors": [...]}.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp

from penstock import AsyncClient, RetryPolicy, Tokens

INTERVAL_S = {"questions": 0.05, "livez": 0.02}
TIMEOUT_S = 60.0


async def main(kind: str, grpc_address: str, http_address: str) -> None:
    latencies_s, errors = list[float](), list[str]()
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        AsyncClient(grpc_address, retry=RetryPolicy(attempts=1), timeout_s=TIMEOUT_S) as client,
        aiohttp.ClientSession(f"http://{http_address}", timeout=timeout, raise_for_status=True) as session,
    ):

        async def question(number: int) -> None:
            if number % 2:
                await client.generate("hello", model="small", max_tokens=2)
            else:
                body = {"model": "small", "prompt": "hello", "max_tokens": 2}
                async with session.post("/v1/completions", json=body) as response:
                    await response.read()

        async def livez(_: int) -> None:
            async with session.get("/livez") as response:
                await response.read()

        async def timed(ask: Callable[[int], Awaitable[None]], number: int) -> None:
            began = time.perf_counter()
            try:
                await ask(number)
                latencies_s.append(time.perf_counter() - began)
            except Exception as error:
                errors.append(repr(error))

        async def reply() -> None:
            last = None
            async for event in client.stream("hello", model="small", max_tokens=200, ignore_eos=True):
                if isinstance(event, Tokens):
                    now = time.perf_counter()
                    if last is not None:
                        latencies_s.append(now - last)
                    last = now

        if kind == "tokens":
            await reply()
            latencies_s.clear()
            print("ready", flush=True)
            while not ended.done():
                await reply()
        else:
            ask = {"questions": question, "livez": livez}[kind]
            await ask(0)
            print("ready", flush=True)
            async with asyncio.TaskGroup() as tasks:
                number = 0
                while not ended.done():
                    number += 1
                    tasks.create_task(timed(ask, number))
                    await asyncio.wait((ended,), timeout=INTERVAL_S[kind])
    print(json.dumps({"latencies_s": latencies_s, "errors": errors}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
