"""Wraps one running SGLang server behind our engine interface.

Token ids go in and come out; text, stop strings and reply rules are ours, so that a reply may go on at any other worker
of the same model. Steps, KV blocks and drafts are the server's own business: those capabilities are not declared.
A seed is handed on, but the server promises the same text only with --enable-deterministic-inference.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.background import end
from services.domain.errors import AlreadyRunning, Overloaded, Unavailable
from services.domain.instances import Load
from services.domain.requests import (
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    SamplingParams,
    TokenFrame,
    TokenLogprob,
    TokenUsage,
)
from worker_service.engine import reply_rules
from worker_service.engine.digest import model_digest
from worker_service.engine.interface import (
    Admitted,
    Capability,
    EngineEvent,
    EngineInfo,
    EngineUnusable,
    Finished,
    HandedOver,
)
from worker_service.engine.sglang.client import Piece, SglangClient
from worker_service.engine.sglang.moves import ABORTED, MOVED, MovingRequests, Running
from worker_service.text.hf import HfTokenizer

_log = logging.getLogger(__name__)

POLL_S = 0.5
THROUGHPUT_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class SglangEngineOptions:
    """folder: the model, for its tokenizer and config. max_requests: at once; one more is Overloaded."""

    folder: Path
    name: str
    endpoint: str
    max_requests: int = 128
    max_context_tokens: int | None = None
    start_timeout_s: float = 600.0
    gone_s: float = 10.0


class SglangEngine(MovingRequests):
    """An Engine over a server that somebody else runs."""

    def __init__(self, options: SglangEngineOptions) -> None:
        self._options = options
        self._requests: dict[str, Running] = {}
        self._arriving: dict[str, asyncio.Task[None]] = {}
        self._produced: deque[tuple[float, int]] = deque()
        self._free_blocks = 0
        self.preemptions = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def steps(self) -> int | None:
        return None

    async def start(self) -> None:
        options = self._options
        if not (options.folder / "config.json").exists():
            raise EngineUnusable(f"{options.folder}: no config.json: the model's folder is needed for its tokenizer")
        self._tokenizer = await asyncio.to_thread(HfTokenizer, options.folder)
        self._client = SglangClient(options.endpoint)
        loop = asyncio.get_running_loop()
        until = loop.time() + options.start_timeout_s
        while not await self._client.healthy():
            if loop.time() > until:
                await self._client.close()
                raise EngineUnusable(f"no SGLang server at {options.endpoint} after {options.start_timeout_s:g} s")
            await asyncio.sleep(POLL_S)
        server = await self._client.info()
        context = min(
            server.context_tokens or _config_context(options.folder),
            options.max_context_tokens or server.kv_tokens,
            server.kv_tokens,
        )
        self._page_tokens = server.page_tokens
        self._free_blocks = server.kv_tokens // server.page_tokens
        self._info = EngineInfo(
            engine="sglang",
            model=options.name,
            model_digest=await asyncio.to_thread(model_digest, options.folder),
            max_context_tokens=context,
            kv_blocks=self._free_blocks,
            kv_block_tokens=server.page_tokens,
            max_requests=options.max_requests,
            capabilities=frozenset({Capability.LOGPROBS, Capability.PREFIX_REUSE, Capability.KV_TRANSFER}),
        )
        self._failure: asyncio.Future[BaseException] = loop.create_future()
        self._poll = asyncio.create_task(self._watch(), name="sglang-watch")

    async def close(self) -> None:
        await end(self._poll, *self._arriving.values())
        for request_id in list(self._requests):
            await self.abort(request_id)
        while self._requests:
            await asyncio.sleep(0.01)
        await self._client.close()

    async def failed(self) -> BaseException:
        return await asyncio.shield(self._failure)

    async def abort(self, request_id: str) -> bool:
        running = self._requests.get(request_id)
        if running is None:
            return False
        running.aborted = True
        if not running.decide(ABORTED):
            await self._client.abort(running.server_id)
        return True

    def load(self) -> Load:
        now = time.monotonic()
        while self._produced and now - self._produced[0][0] > THROUGHPUT_WINDOW_S:
            self._produced.popleft()
        running = [r.prompt_tokens + r.output_tokens for r in self._requests.values() if r.output_tokens]
        queued = [r.prompt_tokens for r in self._requests.values() if not r.output_tokens]
        rate = sum(count for _, count in self._produced) / THROUGHPUT_WINDOW_S
        return Load(tuple(running), tuple(queued), self._free_blocks, rate)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineEvent, None]:
        prompt = self._tokenizer.encode(request.prompt)
        if request.request_id in self._requests:
            raise AlreadyRunning(request.request_id)
        most = reply_rules.reply_room(request, prompt, self._info.max_context_tokens, self._tokenizer)
        if len(self._requests) >= self._options.max_requests:
            raise Overloaded(f"{len(self._requests)} requests are here already", 1.0)
        text = reply_rules.resumed_text(request, self._tokenizer)
        output = list(request.resume_token_ids)
        running = self._requests[request.request_id] = Running(len(prompt), [*prompt, *output], request.request_id)
        cached, reason = 0, None
        ended = False
        try:
            yield Admitted(len(prompt), most)
            if output:
                reason = reply_rules.end_reason(text, output[-1], len(output), most, request.sampling, self._tokenizer)
            if reason is None:
                pieces = self._pieces(request, running, _sampling(request.sampling, most - len(output)))
                async for piece in pieces:
                    if piece is MOVED:
                        ended = True
                        yield HandedOver(len(output))
                        return
                    cached = cached or min(piece.cached_tokens, len(prompt))
                    self.preemptions += piece.retractions if piece.finish else 0
                    first, ids, said = len(output), list[int](), ""
                    for token in piece.token_ids:
                        ids.append(token)
                        said += text.push(token)
                        reason = reply_rules.end_reason(
                            text, token, first + len(ids), most, request.sampling, self._tokenizer
                        )
                        if reason is not None:
                            said += text.finish()
                            break
                    if reason is None and piece.finish is not None:
                        reason = FinishReason.ABORTED if piece.finish == "abort" else FinishReason(piece.finish)
                        said += text.finish()
                    output += ids
                    running.tokens += ids
                    self._produced.append((time.monotonic(), len(ids)))
                    if ids or said:
                        yield TokenFrame(first, tuple(ids), said, self._logprobs(ids, piece))
                    if reason is not None:
                        ended = piece.finish is not None
                        break
                else:
                    if reason is None:
                        raise Unavailable("the SGLang server ended the stream early")
            else:
                ended = True
            assert reason is not None
            yield Finished(reason, TokenUsage(len(prompt), cached, len(output)), text.stopped_by)
        finally:
            del self._requests[request.request_id]
            if not ended:  # a stop string, or nobody reads on: the server is still at it
                asyncio.ensure_future(self._give_up(running.server_id))  # noqa: RUF006 -- ends by itself, briefly

    async def _give_up(self, request_id: str) -> None:
        try:
            await self._client.abort(request_id)
        except Unavailable as error:
            _log.warning("cannot abort %s: %s", request_id, error)

    def _logprobs(self, ids: list[int], piece: Piece) -> tuple[PositionLogprobs, ...]:
        def one(token: int, value: float) -> TokenLogprob:
            return TokenLogprob(token, value, self._tokenizer.token_bytes(token))

        return tuple(
            PositionLogprobs(one(token, value), tuple(one(t, v) for t, v in top))
            for token, (value, top) in zip(ids, piece.logprobs, strict=False)
        )

    async def _watch(self) -> None:
        """Keep an eye on the server; without an answer for `gone_s` the engine has failed."""
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        while True:
            try:
                load = await self._client.load()
                answered_at = loop.time()
                self._free_blocks = (load.capacity_tokens - load.used_tokens) // self._page_tokens
            except Unavailable as error:
                if loop.time() - answered_at > self._options.gone_s and not self._failure.done():
                    self._failure.set_result(error)
            await asyncio.sleep(POLL_S)


def _sampling(sampling: SamplingParams, most: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": most,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.seed is not None and not sampling.greedy:
        made["sampling_seed"] = sampling.seed & 0x7FFFFFFF
    return made


def _config_context(folder: Path) -> int:
    from transformers import AutoConfig

    context: int = AutoConfig.from_pretrained(str(folder), local_files_only=True).max_position_embeddings
    return context
