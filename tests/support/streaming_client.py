"""`python -m tests.support.streaming_client ADDRESS MODEL STREAMS TOKENS`: streams at once, from a process of its own.

It prints a line once every stream has a token, and at their end another: a JSON list of what each one was.
"""

import asyncio
import dataclasses
import json
import sys

from benchmarks.fault_streams import StreamResult, grpc_stream
from penstock import AsyncClient

TIMEOUT_S = 400.0


def prompts(streams: int) -> list[str]:
    return [f"question {i}" for i in range(streams)]


async def main(address: str, model: str, streams: int, tokens: int) -> None:
    results = [StreamResult(prompt) for prompt in prompts(streams)]
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        stream = grpc_stream(client, model=model, max_tokens=tokens)
        running = [asyncio.create_task(stream(r.prompt, r)) for r in results]
        while not all(r.tokens or r.error for r in results):
            await asyncio.sleep(0.01)
        print("begun", flush=True)
        await asyncio.gather(*running)
    print(json.dumps([dataclasses.asdict(r) for r in results]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
