"""Requests one after the other, in several streams at once, while a test changes the mesh that serves them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock import AsyncClient


@asynccontextmanager
async def steady_requests(client: AsyncClient, streams: int) -> AsyncIterator[None]:
    """Each stream asks its prompt again and again, as long as the context lasts; at least once, for the same text."""
    stop, prompts = asyncio.Event(), [f"prompt {i}" for i in range(streams)]
    texts = [(await client.generate(prompt, temperature=0)).text for prompt in prompts]

    async def ask(at: int) -> int:
        answered = 0
        while not stop.is_set():
            assert (await client.generate(prompts[at], temperature=0)).text == texts[at]
            answered += 1
        return answered

    asking = [asyncio.create_task(ask(at)) for at in range(streams)]
    yield
    stop.set()
    assert min(await asyncio.gather(*asking)) > 0
