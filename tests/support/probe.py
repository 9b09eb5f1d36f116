"""`python -m tests.support.probe GRPC_ADDRESS HTTP_ADDRESS`: asks a short question every 50 ms, until its stdin ends.

By gRPC and HTTP in turn, from a process of its own, so that it feels what a bystander feels. Then it prints what came of it
as JSON: {"latencies_s": [...], "errors": [...]}.
"""

import asyncio
import json
import sys
import time

import aiohttp

from penstock import AsyncClient, RetryPolicy

INTERVAL_S = 0.05
TIMEOUT_S = 20.0


async def main(grpc_address: str, http_address: str) -> None:
    latencies_s, errors = list[float](), list[str]()
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        AsyncClient(grpc_address, retry=RetryPolicy(attempts=1), timeout_s=TIMEOUT_S) as client,
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
    ):

        async def ask(number: int) -> None:
            began = time.perf_counter()
            try:
                if number % 2:
                    await client.generate("hello", model="small", max_tokens=2)
                else:
                    body = {"model": "small", "prompt": "hello", "max_tokens": 2}
                    async with session.post(f"http://{http_address}/v1/completions", json=body) as response:
                        await response.read()
                latencies_s.append(time.perf_counter() - began)
            except Exception as error:
                errors.append(repr(error))

        async with asyncio.TaskGroup() as tasks:
            number = 0
            while not ended.done():
                tasks.create_task(ask(number))
                number += 1
                await asyncio.wait((ended,), timeout=INTERVAL_S)
    print(json.dumps({"latencies_s": latencies_s, "errors": errors}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
