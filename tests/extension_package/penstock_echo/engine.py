"""An engine that says again what it was asked."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

from pydantic import Field

from penstock.services.domain.instances import Load
from penstock.services.event_streams import OnTokens
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.types.prompts import ChatPrompt
from penstock.types.replies import FinishReason, TokenFrame, Usage
from penstock.types.requests import GenerationRequest
from penstock.types.workers import Admitted, EngineFinished
from penstock.worker_service.engine.extension import EngineExtension, EngineSite
from penstock.worker_service.engine.interface import EngineEvent, EngineInfo
from penstock.worker_service.text.tokenizer import ByteTokenizer

CONTEXT_TOKENS = 4096


class EchoEngine:
    """An Engine."""

    def __init__(self, name: str, times: int, max_requests: int) -> None:
        self.tokenizer = ByteTokenizer()
        self.steps: int | None = None
        self.preemptions = 0
        self.info = EngineInfo(
            "echo", name, f"echo-{times}", CONTEXT_TOKENS, 1, CONTEXT_TOKENS, max_requests, frozenset()
        )
        self._times = times
        self._failure: asyncio.Future[BaseException]

    async def start(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        pass

    async def failed(self) -> BaseException:
        return await self._failure

    async def abort(self, request_id: str) -> bool:
        return False  # every reply is there at once

    def load(self) -> Load:
        return Load(running_tokens=(), free_kv_blocks=1, output_tokens_per_s=0.0)

    async def generate(
        self, request: GenerationRequest, on_tokens: OnTokens | None = None
    ) -> AsyncGenerator[EngineEvent, None]:
        prompt = request.prompt
        asked = prompt.messages[-1].content if isinstance(prompt, ChatPrompt) else "?"
        text = " ".join([asked] * self._times)
        tokens = tuple(text.encode())
        yield Admitted(len(asked), len(tokens))
        frame = TokenFrame(0, tokens, text)
        if on_tokens is None:
            yield frame
        else:
            on_tokens(frame)
        yield EngineFinished(FinishReason.STOP, Usage(len(asked), 0, len(tokens)))


class Echo(EngineExtension):
    """`echo`: the prompt, as often as wanted."""

    tier_fields = frozenset({"max_running", "max_queued"})

    times: int = Field(default=1, ge=1)
    """How often the prompt is said again."""

    def models(self, tier: MeshTier) -> Iterator[tuple[str, str]]:
        yield from ()

    def build(self, site: EngineSite) -> EchoEngine:
        return EchoEngine(site.tier.served_name, self.times, site.tier.max_running + site.tier.max_queued)
