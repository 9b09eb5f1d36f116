"""Migration of running requests between SGLang servers.

A server does not export its KV. It computes the KV of the same tokens again, or loads it from a hierarchical cache that both
servers share (`--hicache-storage-backend`); so tokens are transferred. KvTransferring is implemented as follows:

- a block has no layers, and chunks are empty;
- `reserve` lets the target's server prefetch the prefix while the source keeps decoding;
- `pause` aborts the request on the source's server at a token boundary, which also writes the rest of its KV to the store;
- `enter` generates after all tokens, of which the target's server has all but the last few.

Without a shared store, or below its shortest prefix (256 tokens), the target computes the prefix in advance, which is slower.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from penstock.services.background import end
from penstock.services.domain.errors import AlreadyRunning, NotFound, Overloaded, Unavailable, invalid
from penstock.services.event_streams import OnTokens
from penstock.types.requests import GenerationRequest
from penstock.types.workers import HandedOver, KvLayout
from penstock.worker_service.engine.engine_of_server import EngineOfServer
from penstock.worker_service.engine.interface import Blocks, EngineEvents, EngineInfo, LastBlocks, Stopped, blocks_from
from penstock.worker_service.engine.sglang.client import Piece, ServerInfo, SglangClient, greedy, server_id
from penstock.worker_service.engine.sglang.forms import sampling_form, sampling_parameters
from penstock.worker_service.scheduling.sequence import SequenceSlo
from penstock.worker_service.text.encoder import PromptEncoder
from penstock.worker_service.text.hf import HfTokenizer

if TYPE_CHECKING:
    from penstock.worker_service.engine.sglang.server_link import SglangEngineOptions
    from penstock.worker_service.engine.sglang.turns import SendQueue

_log = logging.getLogger(__name__)

AHEAD_S = 3.0  # a prefix that takes longer is refused for now, but still prefetched for the next attempt
RETRY_S = 0.5
MOVED, ABORTED = Piece([], [], "moved"), Piece([], [], "abort")


@dataclass(slots=True, eq=False)
class Running:
    """One request. tokens: prompt and output so far. server_id: its id on the server, which changes with each pause.

    computing: whether its first token has arrived. moved: whether it runs on another engine.
    stopped: set while it is being paused; done when its last token has arrived. decision: whether it resumes or moves.
    slo: the SLO it asks for; None for none. turn: set while it waits to be sent to the server; the result is False if it was
    aborted there. sent: whether it is on the server. answered: whether tokens have arrived since it was sent.
    preempted: whether it is paused for the sake of others, which counts in `preemptions`.
    """

    tokens: list[int]
    prompt_tokens: int
    server_id: str
    computing: bool = False
    stopped: "asyncio.Future[None] | None" = None
    decision: "asyncio.Future[Piece | None] | None" = None
    aborted: bool = False
    moved: bool = False
    slo: SequenceSlo | None = None
    turn: "asyncio.Future[bool] | None" = None
    sent: bool = False
    answered: bool = False
    preempted: bool = False
    preemptions: int = 0

    @property
    def waits(self) -> bool:
        """Whether it waits to be sent to the server."""
        return self.turn is not None

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def decoding(self) -> bool:
        """Whether it may be paused, to move."""
        return self.computing and self.stopped is None and self.sent and not self.preempted

    def decide(self, decision: Piece | None) -> bool:
        """Decide about a paused request: its last piece, or None to resume. False if it is not paused."""
        if self.decision is None or self.decision.done():
            return False
        self.decision.set_result(decision)
        return True


class MovingRequests(EngineOfServer[Running]):
    """The part of the engine for migration."""

    options: "SglangEngineOptions"
    _client: SglangClient
    _server: ServerInfo
    _sends: "SendQueue"
    tokenizer: HfTokenizer
    info: EngineInfo
    _encoder: PromptEncoder
    _arriving: dict[str, "asyncio.Task[None]"]

    def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> EngineEvents:
        raise NotImplementedError

    @property
    def kv_layout(self) -> KvLayout:
        """A block has no layers, because no KV is transferred."""
        return KvLayout(self.info.model_digest, 0, 0, 0, self.info.kv_block_tokens, "float32")

    async def computed_tokens(self, request_id: str) -> tuple[int, ...]:
        return tuple(self._decoding(request_id).tokens[:-1])

    async def read_kv(self, request_id: str, first_block: int, blocks: int, out: Blocks | None = None) -> Blocks:
        full = (len(self._decoding(request_id).tokens) - 1) // self.info.kv_block_tokens
        if not 0 <= first_block < first_block + blocks <= full:
            raise invalid("first_block", f"blocks {first_block} to {first_block + blocks - 1} of {full} full ones")
        return blocks_from(self.kv_layout, b"", blocks)

    async def pause(self, request_id: str, first_block: int) -> Stopped:
        running = self._decoding(request_id)
        used = -(-(len(running.tokens) - 1) // self.info.kv_block_tokens)
        if not 0 <= first_block <= used:
            raise invalid("first_block", f"the request has {used} blocks")
        running.stopped = stopped = asyncio.get_running_loop().create_future()
        try:
            await self._client.abort(running.server_id)
            await stopped
        except BaseException:
            stopped.cancel()  # if it pauses anyway, it resumes at once
            running.decide(None)
            raise
        return Stopped(tuple(running.tokens), running.output_tokens, blocks_from(self.kv_layout, b"", 0))

    async def resume(self, request_id: str) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            running.decide(None)

    async def leave(self, request_id: str) -> HandedOver:
        running = self._requests.get(request_id)
        if running is None or not running.decide(MOVED):
            raise NotFound("stopped request", request_id)
        return HandedOver(running.output_tokens)

    async def reserve(self, transfer_id: str, layout: KvLayout, tokens: Sequence[int], cache_salt: str = "") -> int:
        if layout != self.kv_layout:
            raise invalid("layout", f"this engine has {self.kv_layout}, not {layout}")
        if transfer_id in self._arriving:
            raise AlreadyRunning(transfer_id)
        if not tokens:
            raise invalid("token_ids", "must not be empty")
        if len(self._requests) + len(self._arriving) >= self.info.max_requests:
            raise Overloaded("the limit on running requests is reached", RETRY_S)
        prefetching = self._prefetch(transfer_id, list(tokens), cache_salt)
        reading = self._arriving[transfer_id] = asyncio.create_task(prefetching)
        try:
            async with asyncio.timeout(AHEAD_S):
                await asyncio.shield(reading)
        except TimeoutError:
            reading.add_done_callback(lambda _: self._arriving.pop(transfer_id, None))
            raise Overloaded(f"{len(tokens)} tokens were not prefetched within {AHEAD_S:g} s", RETRY_S) from None
        except BaseException:
            await self.release(transfer_id)
            raise
        return len(tokens) // layout.block_tokens

    async def write_kv(self, transfer_id: str, first_block: int, data: Blocks) -> None:
        """Do nothing: the prefix is prefetched, and the few tokens after it are computed when the request starts."""
        if transfer_id not in self._arriving:
            raise NotFound("transfer", transfer_id)

    async def prepare_entry(self, transfer_id: str, request: GenerationRequest) -> None:
        await self._encoder.encode_ahead(transfer_id, request.request_id, request.prompt)

    async def enter(
        self,
        transfer_id: str,
        request: GenerationRequest,
        tokens: Sequence[int],
        last: LastBlocks | None = None,
        on_tokens: OnTokens | None = None,
    ) -> EngineEvents:
        """As in `KvTransferring`; the last blocks are computed, so `last` is ignored."""
        if self._arriving.pop(transfer_id, None) is None:
            raise NotFound("transfer", transfer_id)
        prompt = await self._encoder.encode_arrived(transfer_id, request.request_id, request.prompt)
        if list(tokens[: len(prompt)]) != prompt:
            raise invalid("token_ids", "must begin with the prompt of the request")
        resumed = replace(request, resume_token_ids=tuple(tokens[len(prompt) :]))
        async with aclosing(self.generate(resumed, on_tokens)) as events:
            async for event in events:
                yield event

    async def release(self, transfer_id: str) -> None:
        self._encoder.forget(transfer_id)
        reading = self._arriving.pop(transfer_id, None)
        if reading is not None:
            await end(reading)

    async def _pieces(self, request: GenerationRequest, running: Running, most: int) -> AsyncGenerator[Piece, None]:
        """The pieces of a reply across its pauses, with at most `most` output tokens. The caller adds their tokens to
        `running`. The last piece is MOVED if the request has moved."""
        resumed = running.output_tokens > 0
        form = self._form(request)
        try:
            while True:
                if not await self._sends.turn(running):
                    yield ABORTED
                    return
                stopped = False
                # A grammar begins with a request, and penalties count what it has generated: what there is of the reply
                # already is written again, and left out.
                from_start = form or request.sampling.penalizes
                again = running.tokens[running.prompt_tokens :] if from_start else []
                room, per_event = most - running.output_tokens + len(again), self._tokens_per_event(request)
                pieces = self._client.generate(
                    running.server_id,
                    running.tokens[: len(running.tokens) - len(again)],
                    sampling_parameters(request.sampling, room, per_event) | form,
                    top_logprobs=request.sampling.top_logprobs,
                    priority=request.priority if self._server.priorities else None,
                    cache_salt=request.cache_salt,
                )
                async with aclosing(pieces):
                    async for whole in pieces:
                        piece = _without(whole, again)
                        if resumed:
                            _record("kv taken over", request.request_id, len(running.tokens), piece)
                            resumed = False
                        paused = running.stopped is not None or running.preempted
                        stopped = piece.finish == "abort" and paused and not running.aborted
                        yield replace(piece, finish=None) if stopped else piece
                if not stopped:
                    return
                self._sends.left(running)
                running.preempted = False
                if running.stopped is not None and (decision := await self._decision(running)) is not None:
                    running.moved = decision is MOVED
                    yield decision
                    return
                running.server_id = server_id(request.request_id)
        finally:
            if running.stopped is not None and not running.stopped.done():
                running.stopped.set_exception(NotFound("decoding request", request.request_id))  # the request has ended

    def _form(self, request: GenerationRequest) -> dict[str, Any]:
        """As in `sampling_form`."""
        return sampling_form(request, self.tokenizer.tool_format, enforces=self._server.grammars)

    def _tokens_per_event(self, request: GenerationRequest) -> int:
        """Tokens per event after the first: as many as one stream generates in the time that they may be held."""
        hold, running = self.options.hold, sum(each.computing for each in self._requests.values())
        if hold is None or not running:
            return 1
        wait_s = max(hold.seconds, request.output_interval_s or 0.0)
        return max(1, min(hold.tokens, int(wait_s * self._throughput.per_second(time.monotonic()) / running)))

    @staticmethod
    async def _decision(running: Running) -> Piece | None:
        """Wait for the decision about a paused request."""
        stopped = running.stopped
        assert stopped is not None
        if stopped.done():  # the caller was cancelled
            running.stopped = None
            return None
        running.decision = asyncio.get_running_loop().create_future()
        stopped.set_result(None)
        try:
            return await running.decision
        finally:
            running.stopped = running.decision = None

    def _decoding(self, request_id: str) -> Running:
        running = self._requests.get(request_id)
        if running is None or not running.decoding:
            raise NotFound("decoding request", request_id)
        return running

    async def _prefetch(self, transfer_id: str, tokens: list[int], cache_salt: str) -> None:
        """Let the server load or compute a prefix.

        Raises:
            Overloaded: The server is full.
            Unavailable: The server does not respond.
        """
        request_id = server_id(f"{transfer_id}#ahead")
        async for piece in self._client.generate(request_id, tokens, greedy(1), cache_salt=cache_salt):
            if piece.finish is not None:
                _record("prefix read ahead", transfer_id, len(tokens), piece)


def _record(action: str, request_id: str, tokens: int, piece: Piece) -> None:
    """Record in the current span and the log where the KV of the tokens came from."""
    loaded, held, computed = (
        piece.stored_tokens,
        piece.cached_tokens - piece.stored_tokens,
        tokens - piece.cached_tokens,
    )
    counts = {"loaded": loaded, "held": held, "computed": computed}
    trace.get_current_span().add_event(action, {f"penstock.kv.{name}_tokens": n for name, n in counts.items()})
    _log.info("%s: %s: %d loaded, %d held, %d computed", request_id, action, loaded, held, computed)


def _without(piece: Piece, again: list[int]) -> Piece:
    """A piece without the tokens that the reply has already: those of `again`, which are taken off it.

    Raises:
        Unavailable: the server writes something else this time.
    """
    count = min(len(again), len(piece.token_ids))
    if not count:
        return piece
    if piece.token_ids[:count] != again[:count]:
        raise Unavailable("the SGLang server does not write the same reply again: its form or penalties cannot be kept")
    del again[:count]
    return replace(piece, token_ids=piece.token_ids[count:], logprobs=piece.logprobs[count:])
