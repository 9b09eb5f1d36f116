"""The engine of a remote tier: any endpoints of OpenAI's API.

The endpoint renders prompts, samples and ends replies. Its replies are text; the bytes of the text take the place of tokens,
so the positions of a reply are bytes, while usage is what the endpoint counts. Calls and reasoning, which endpoints send
apart, are written into the text as models write them. Log-probabilities are of the endpoint's own tokens.

A reply that is resumed is generated again from its beginning and compared: it continues only if the endpoint writes the same.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from penstock.services.domain.errors import PenstockError, Unavailable, UnsupportedByModel, invalid
from penstock.services.domain.instances import Load
from penstock.services.event_streams import OnTokens, unless_passed
from penstock.services.mesh_schema.tiers import MeshTier
from penstock.types.prompts import ChatMessage, ChatPrompt
from penstock.types.replies import FinishReason, PositionLogprobs, TokenFrame, Usage
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.workers import Admitted, EngineFinished
from penstock.worker_service.engine import reply_rules
from penstock.worker_service.engine.engine_of_server import EngineOfServer
from penstock.worker_service.engine.interface import Capability, EngineEvents, EngineInfo, EngineUnusable
from penstock.worker_service.engine.remote.client import RemoteClient, events
from penstock.worker_service.engine.remote.deltas import RemoteReply
from penstock.worker_service.engine.remote.extension import OpenAi
from penstock.worker_service.engine.remote.requests import chat_body
from penstock.worker_service.engine.remote.tokenizer import RemoteTokenizer
from penstock.worker_service.text.reply import ReplyText
from penstock.worker_service.text.request_failures import request_failed

_log = logging.getLogger(__name__)

DEFAULT_REMOTE_CONTEXT = 131_072
"""Of models whose context the mesh file does not state; the endpoint refuses what is too long for it."""
CHARS_PER_TOKEN = 4  # an estimate, until the endpoint tells its own count
POLL_S = 0.5
TRIAL = GenerationRequest(
    "trial", ChatPrompt((ChatMessage("user", "Hi"),)), SamplingParams(max_tokens=16, top_logprobs=0)
)
"""What an endpoint is asked once, to see whether it gives log-probabilities; some refuse shorter replies."""
_REASONS = {"length": FinishReason.LENGTH}


@dataclass(slots=True)
class _Running:
    """A request at the endpoint. prompt_tokens: an estimate. output: bytes of the reply so far. opening: its stream."""

    prompt_tokens: int
    output: int = 0
    opening: asyncio.Task[aiohttp.ClientResponse] | None = None
    aborted: bool = False
    response: aiohttp.ClientResponse | None = None


class RemoteEngine(EngineOfServer[_Running]):
    """An Engine around endpoints."""

    def __init__(self, tier: MeshTier, options: OpenAi, key: str = "") -> None:
        """key: sent to the endpoints; empty: none."""
        super().__init__(tier.max_running + tier.max_queued)
        self._tier, self._options, self._key = tier, options, key
        self._max_context_tokens = tier.max_context_tokens or DEFAULT_REMOTE_CONTEXT
        self.tokenizer = RemoteTokenizer()
        self._gives_logprobs = True

    @property
    def info(self) -> EngineInfo:
        identity = "\n".join([self._tier.model, *sorted(self._options.endpoints)])
        return EngineInfo(
            engine="openai",
            model=self._tier.served_name,
            model_digest=f"remote-{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}",
            max_context_tokens=self._max_context_tokens,
            kv_blocks=1,  # the endpoint's KV is not known
            kv_block_tokens=self._max_context_tokens,
            max_requests=self._limit,
            capabilities=frozenset({Capability.STRUCTURED_OUTPUT})
            | ({Capability.LOGPROBS} if self._gives_logprobs else set()),
            sampling_defaults=None,
        )

    async def start(self) -> None:
        self._client = RemoteClient(self._options.endpoints, self._key, self._options.silence_s)
        self._failure = asyncio.get_running_loop().create_future()
        try:
            models = await self._models()
            if models and self._tier.model not in models:
                listed = ", ".join(models[:10])
                raise EngineUnusable(f"openai.endpoints: no model '{self._tier.model}' there, but {listed}")
        except BaseException:
            await self._client.close()
            raise
        self._gives_logprobs = await self._tries_logprobs()

    async def _tries_logprobs(self) -> bool:
        """Whether a reply comes with log-probabilities; True where the endpoint has no reply for now."""
        body, reply = self._body(TRIAL), RemoteReply()
        try:
            response = await self._client.open(body)
            try:
                return any([reply.logprobs(event) async for event in events(response)])
            finally:
                response.close()
        except UnsupportedByModel:
            return False
        except (PenstockError, KeyError, TypeError, ValueError, AttributeError) as error:
            _log.warning("it is not known whether the endpoint gives log-probabilities: %s", error)
            return True

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        options, given = self._options, self._gives_logprobs
        return chat_body(request, self._tier.model, options.extensions, options.limit_field, logprobs=given)

    async def _models(self) -> list[str]:
        """Wait until an endpoint answers; return its models.

        Raises:
            EngineUnusable: None answers in time.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._options.start_timeout_s
        while True:
            try:
                return await self._client.models()
            except Unavailable as error:
                if loop.time() + POLL_S > until:
                    raise EngineUnusable(f"openai.endpoints: {error}") from error
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        if await self._abort_all():
            await self._client.close()

    async def abort(self, request_id: str) -> bool:
        running = self._requests.get(request_id)
        if running is None:
            return False
        running.aborted = True
        if running.response is not None:
            running.response.close()
        elif running.opening is not None:
            running.opening.cancel()
        return True

    def load(self) -> Load:
        running = self._requests.values()
        return Load(
            running_tokens=tuple(r.prompt_tokens + r.output // CHARS_PER_TOKEN for r in running),
            free_kv_blocks=1,
            output_tokens_per_s=self._throughput.per_second(time.monotonic()),
            input_tokens=tuple(r.prompt_tokens for r in running),
        )

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> EngineEvents:
        """As in `Engine`.

        Raises:
            UnsupportedByModel: The request needs something that the endpoint does not have, or it refuses the request.
            Unavailable: No endpoint answers, a stream broke, or a resumed reply was written differently.
        """
        body = self._body(request)
        resumed = request.resume_token_ids
        if resumed and max(resumed) >= self.tokenizer.vocab_size:
            raise invalid("resume_token_ids", "are not those of this tier")
        text = reply_rules.resumed_text(request, self.tokenizer)
        prompt_tokens = _estimate(request)
        most = request.sampling.max_tokens or max(1, self._max_context_tokens - prompt_tokens)
        with self._placed(request.request_id, _Running(prompt_tokens)) as running:
            again, running.output = bytes(resumed), len(resumed)
            if text.stopped:
                yield Admitted(prompt_tokens, most)
                yield EngineFinished(FinishReason.STOP, Usage(prompt_tokens, 0, 0), text.stopped_by)
                return
            reply, reason = RemoteReply(request.sampling.top_logprobs or 0), None
            try:
                async with self._response(running, body, _without_logprobs(request, body)) as response:
                    yield Admitted(prompt_tokens, most)
                    async for event in events(response):
                        data, again = _beyond(reply.text(event).encode(), again)
                        frame = self._frame(running, data, text, reply.logprobs(event) if data else ())
                        if frame := unless_passed(frame, on_tokens):
                            yield frame
                        if text.stopped_by is not None:
                            reason = FinishReason.STOP
                            break
            except (PenstockError, asyncio.CancelledError):
                if not running.aborted:
                    raise
                reason = FinishReason.ABORTED
            except (KeyError, TypeError, ValueError, AttributeError) as error:  # no event of a chat completion
                raise request_failed(request.request_id, error) from error
            if reason is None:
                if reply.finish_reason is None:
                    raise Unavailable("the endpoint ended the stream early")
                reason = _REASONS.get(reply.finish_reason, FinishReason.STOP)
            rest, again = _beyond(reply.end().encode() if reason is FinishReason.STOP else b"", again)
            if again and reason is not FinishReason.ABORTED:
                raise Unavailable("the endpoint does not write the same reply again, so it cannot be resumed")
            if frame := unless_passed(self._frame(running, rest, text, last=True), on_tokens):
                yield frame
            usage = reply.usage or Usage(prompt_tokens, 0, math.ceil(running.output / CHARS_PER_TOKEN))
        yield EngineFinished(reason, usage, text.stopped_by)

    @contextlib.asynccontextmanager
    async def _response(
        self, running: _Running, body: dict[str, Any], spare: dict[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The stream of a request, closed at the end of the context. spare: what is asked if the endpoint refuses `body`.

        Raises:
            PenstockError: As `RemoteClient.open`; Unavailable where the request is aborted meanwhile.
        """
        running.opening = asyncio.create_task(self._open(body, spare))
        try:
            await asyncio.wait([running.opening])
            if running.opening.cancelled():
                raise Unavailable("aborted")
            response = running.response = running.opening.result()
        except asyncio.CancelledError:  # the caller has left
            running.opening.cancel()
            await asyncio.wait([running.opening])
            if not running.opening.cancelled() and running.opening.exception() is None:
                running.opening.result().close()
            raise
        try:
            yield response
        finally:
            response.close()  # a reply that has not ended is no longer generated

    async def _open(self, body: dict[str, Any], spare: dict[str, Any] | None) -> aiohttp.ClientResponse:
        try:
            return await self._client.open(body)
        except UnsupportedByModel:
            if spare is None:
                raise
            return await self._client.open(spare)

    def _frame(
        self,
        running: _Running,
        data: bytes,
        text: ReplyText,
        logprobs: tuple[PositionLogprobs, ...] = (),
        *,
        last: bool = False,
    ) -> TokenFrame | None:
        """The next part of a reply; None if there is nothing."""
        first, token_ids, new_text = running.output, list[int](), ""
        for byte in data:
            if text.stopped:
                break
            token_ids.append(byte)
            new_text += text.push(byte)
        if last:
            new_text += text.finish()
        running.output += len(token_ids)
        self._throughput.add(math.ceil(len(token_ids) / CHARS_PER_TOKEN), time.monotonic())
        return TokenFrame(first, tuple(token_ids), new_text, logprobs) if token_ids or new_text else None


def _without_logprobs(request: GenerationRequest, body: dict[str, Any]) -> dict[str, Any] | None:
    """What may be asked instead, if anything: some endpoints give no log-probabilities of replies with tools."""
    if request.sampling.top_logprobs != 0 or "logprobs" not in body:
        return None
    return {name: value for name, value in body.items() if name not in ("logprobs", "top_logprobs")}


def _estimate(request: GenerationRequest) -> int:
    """About how many tokens a prompt has."""
    return max(1, math.ceil(request.prompt.characters / CHARS_PER_TOKEN))


def _beyond(data: bytes, again: bytes) -> tuple[bytes, bytes]:
    """What of `data` is beyond the part of the reply that there is already, and what of that part is still to come.

    Raises:
        Unavailable: The endpoint writes something else this time.
    """
    count = min(len(data), len(again))
    if data[:count] != again[:count]:
        raise Unavailable("the endpoint does not write the same reply again, so it cannot be resumed")
    return data[count:], again[count:]
