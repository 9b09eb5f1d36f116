"""The engine around an SGLang server, which it starts or which is already running.

Requests and replies are token ids; text, stop strings and reply rules are handled here, so that a reply can continue on any
other worker of the same model. Steps and KV blocks are internal to the server, so those capabilities are not declared.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.services.background import EndProcess, end, supervise
from penstock.services.domain.errors import InvalidRequest, Overloaded, PenstockError, Unavailable, invalid
from penstock.services.domain.instances import Load
from penstock.services.domain.slo.reply_length import ReplyLengths
from penstock.services.event_streams import OnTokens, unless_passed
from penstock.types.replies import FinishReason, TokenFrame, Usage
from penstock.types.requests import GenerationRequest
from penstock.types.workers import Admitted, Declined, EngineFinished, HandedOver
from penstock.worker_service.engine import reply_rules
from penstock.worker_service.engine.busy_share import BusyShare
from penstock.worker_service.engine.digest import model_digest
from penstock.worker_service.engine.generation_config import sampling_defaults
from penstock.worker_service.engine.interface import NOT_KEPT, Capability, EngineEvents, EngineInfo, EngineUnusable
from penstock.worker_service.engine.sglang.client import Piece, ServerInfo, ServerLoad, server_id
from penstock.worker_service.engine.sglang.forms import FIELD
from penstock.worker_service.engine.sglang.moves import ABORTED, MOVED, MovingRequests, Running
from penstock.worker_service.engine.sglang.others import OtherClients
from penstock.worker_service.engine.sglang.reply import ServerReply
from penstock.worker_service.engine.sglang.server import start_turn
from penstock.worker_service.engine.sglang.server_link import ServerLink, SglangEngineOptions
from penstock.worker_service.engine.sglang.turns import SendQueue
from penstock.worker_service.scheduling.sequence import SequenceSlo
from penstock.worker_service.text.encoder import EncodingAborted, PromptEncoder
from penstock.worker_service.text.hf import HfTokenizer
from penstock.worker_service.text.request_failures import request_failed

if TYPE_CHECKING:
    from penstock.worker_service.engine.sglang.shadow import ShadowScheduler

_log = logging.getLogger(__name__)

CACHE_POLLS = 4  # number of polls between two reads of the metrics page, which is long


class SglangEngine(MovingRequests):
    """An Engine around a server."""

    def __init__(self, options: SglangEngineOptions) -> None:
        super().__init__(options.max_requests)
        self.options, self._link = options, ServerLink(options)
        self._arriving: dict[str, asyncio.Task[None]] = {}
        self._busy = BusyShare(time.monotonic)
        self._free_blocks = self._cached_tokens = self._polls = 0
        self._leaving: set[asyncio.Future[None]] = set()
        self._shadow: ShadowScheduler | None = None
        self._sends = SendQueue(self._requests, self._give_up, None)
        self._reply_lengths = ReplyLengths()

    async def start(self) -> None:
        options = self.options
        if not (options.folder / "config.json").exists():
            raise EngineUnusable(
                f"{options.folder}: no config.json: the folder of the model is required for its tokenizer"
            )
        vocab_size = await asyncio.to_thread(config_vocab, options.folder)
        self.tokenizer = await asyncio.to_thread(HfTokenizer, options.folder, vocab_size, options.tool_format)
        async with start_turn() if options.launch is not None and options.launch.kv_store else contextlib.nullcontext():
            await self._link.start(options.launch)
            if options.keeps_slos:
                self._shadow = await self._calibrated(vocab_size)
                self._sends = SendQueue(self._requests, self._give_up, self._shadow)
        self._client, self._server = self._link.client, self._link.info
        server = self._server
        self._others, self._gpus = OtherClients(), server.tp * server.pp * server.dp
        self._free_blocks = server.kv_tokens // server.page_tokens
        self.info = EngineInfo(
            engine="sglang",
            model=options.name,
            model_digest=await asyncio.to_thread(model_digest, options.folder, options.adapter),
            max_context_tokens=min(server.input_tokens, options.max_context_tokens or server.input_tokens),
            kv_blocks=self._free_blocks,
            kv_block_tokens=server.page_tokens,
            max_requests=options.max_requests,
            capabilities=_capabilities(server, options),
            sampling_defaults=await asyncio.to_thread(sampling_defaults, options.folder),
        )
        self._failure = asyncio.get_running_loop().create_future()
        self._encoder = PromptEncoder(self.tokenizer, self.info.max_context_tokens)
        self._throughput.restart(time.monotonic())
        await self._link.turn(up=True)
        self._poll = supervise("sglang-watch", self._watch, EndProcess(self._failure.set_result), endless=False)

    async def _calibrated(self, vocab_size: int) -> "ShadowScheduler":
        """Measure the steps of the server, which should be idle, for the prediction of SLOs.

        Raises:
            EngineUnusable: The server refuses the measurement.
        """
        from penstock.worker_service.engine.sglang.profile import measured_latency  # numba takes a second to import
        from penstock.worker_service.engine.sglang.shadow import ShadowScheduler, chunk_within

        server = self._link.info
        try:
            latency = await measured_latency(self._link.client, server, vocab_size)
        except (Unavailable, Overloaded, InvalidRequest) as error:
            await self._link.stop()
            raise EngineUnusable(f"cannot measure the steps of the SGLang server: {error}") from error
        tpot_s, shape = self.options.tightest_tpot_s, self.options.launch
        if tpot_s is not None and shape is not None:
            chunk = chunk_within(tpot_s, latency, server)
            if chunk < server.step_tokens:
                _log.info("chunks of %d tokens instead of %d, for %g s per token", chunk, server.step_tokens, tpot_s)
                await self._link.stop()
                await self._link.start(replace(shape, max_step_tokens=chunk))
                server = self._link.info
        shadow = ShadowScheduler(latency, server)
        await asyncio.to_thread(shadow.warm)
        return shadow

    @property
    def latency_correction(self) -> float | None:
        return self._shadow.correction.factor if self._shadow is not None else None

    async def close(self) -> None:
        if not await self._abort_all():
            return
        self._encoder.close()
        await end(self._poll, *self._arriving.values())
        await asyncio.gather(*self._leaving)
        await self._link.stop()

    def availability(self) -> AsyncIterator[bool]:
        return self._link.availability()

    async def abort(self, request_id: str) -> bool:
        if self._encoder.abort(request_id):
            return True
        running = self._requests.get(request_id)
        if running is None:
            return False
        running.aborted = True
        if not running.decide(ABORTED) and not self._sends.end_turn(running):
            await self._client.abort(running.server_id)
        return True

    def load(self) -> Load:
        running = [r for r in self._requests.values() if r.computing]
        queued = [r for r in self._requests.values() if not r.computing]
        others = self._others
        return Load(
            running_tokens=(*(len(r.tokens) for r in running), *[others.tokens_each] * others.running),
            queued_tokens=(*(len(r.tokens) for r in queued), *[others.tokens_each] * others.waiting),
            free_kv_blocks=self._free_blocks,
            output_tokens_per_s=self._throughput.per_second(time.monotonic()),
            input_tokens=tuple(r.prompt_tokens for r in (*running, *queued)),
            cached_tokens=self._cached_tokens,
            slo=self._shadow.headroom(list(self._requests.values())) if self._shadow is not None else None,
        )

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> EngineEvents:
        received_s, resumed = time.monotonic(), request.resume_token_ids
        try:
            prompt = await self._encoder.encode(request.request_id, request.prompt, continued=bool(resumed))
        except EncodingAborted:
            yield EngineFinished(FinishReason.ABORTED, Usage(output_tokens=len(resumed)))
            return
        self._form(request)  # raises before the request is admitted
        reply = ServerReply.begun(request, prompt, self.info.max_context_tokens, self.tokenizer)
        with self._place(request.request_id, [*prompt, *reply.output], len(prompt)) as running:
            slo_kept = await self._slo_kept(running, reply, received_s)
            if slo_kept is False and request.decline_unkept_slo:
                yield Declined(NOT_KEPT)
                yield EngineFinished(FinishReason.DECLINED, Usage(len(prompt), 0, len(reply.output)))
                return
            yield Admitted(len(prompt), reply.most, bool(slo_kept))
            if reply.reason is None:
                pieces = self._pieces(request, running, reply.most)
                with self._accounted(running, reply):
                    async with contextlib.aclosing(pieces):
                        async for piece in pieces:
                            if frame := unless_passed(self._frame(running, reply, piece), on_tokens):
                                yield frame
                            if reply.reason is not None or piece is MOVED:
                                break
                if reply.reason is None and not running.moved:
                    raise Unavailable("the SGLang server ended the stream early")
            usage = Usage(len(prompt), reply.cached, len(reply.output), compute_s=reply.compute_s)
            preemptions = reply.preemptions + running.preemptions
        if reply.reason is None:
            yield HandedOver(len(reply.output))
            return
        if reply.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._reply_lengths.add(len(reply.output))
        yield EngineFinished(reply.reason, usage, reply.text.stopped_by, preemptions)

    async def _slo_kept(self, running: Running, reply: ServerReply, received_s: float) -> bool | None:
        """Whether the SLO of a request will be kept; None if it has none, or nothing is left to compute."""
        if self._shadow is None or reply.reason is not None:
            return None
        predicted = self._reply_lengths.predict(len(reply.output), reply.most)
        again = self._reply_lengths.predict_after(predicted, reply.most)
        running.slo = slo = SequenceSlo.requested(reply.request.slo, received_s, predicted, again)
        return None if slo is None else await self._sends.admit(running, slo)

    def _frame(self, running: Running, reply: ServerReply, piece: Piece) -> TokenFrame | None:
        """The frame of a piece that has arrived; None if it has neither tokens nor text."""
        reply.generating = piece.finish is None
        if piece is MOVED:
            return None
        first = len(reply.output)
        ids, text = reply.take(piece)
        running.tokens += ids
        running.computing = True
        if ids:
            self._sends.arrived(running, len(ids))
        self._throughput.add(len(ids), time.monotonic())
        values = zip(ids, piece.logprobs, strict=False)
        logprobs = tuple(reply_rules.logprobs(self.tokenizer, token, value, top) for token, (value, top) in values)
        return TokenFrame(first, tuple(ids), text, logprobs) if ids or text else None

    @contextlib.contextmanager
    def _accounted(self, running: Running, reply: ServerReply) -> Iterator[None]:
        """Count what the server does for a reply in the context, and tell it when the reply is no longer needed.

        Raises:
            InvalidRequest: The server refuses the request.
            RequestFailed: The text or the logprobs cannot be computed.
        """
        entered, reply.generating = self._busy.enter(), True
        try:
            yield
        except (Unavailable, Overloaded):
            reply.generating = False
            if not running.aborted:
                raise
            reply.reason = FinishReason.ABORTED
        except InvalidRequest as error:
            reply.generating = False
            if reply.request.has_form and error.problems[0].field == "request":
                raise invalid(FIELD, error.problems[0].problem) from error
            raise
        except (PenstockError, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # text or logprobs that cannot be computed, an unexpected response
            raise request_failed(reply.request.request_id, error) from error
        finally:
            reply.compute_s = self._busy.leave(entered) * self._gpus
            self.preemptions += reply.preemptions + running.preemptions
            if reply.generating:  # a stop string, or the caller has left
                self._give_up(running)

    @contextlib.contextmanager
    def _place(self, request_id: str, tokens: list[int], prompt_tokens: int) -> Iterator[Running]:
        """Register a request. Raises as `_placed`, and Unavailable while the server is down."""
        if not self._link.up:
            raise Unavailable("the SGLang server is down")
        try:
            with self._placed(request_id, Running(tokens, prompt_tokens, server_id(request_id))) as running:
                yield running
        finally:
            self._sends.advance()

    def _give_up(self, running: Running) -> None:
        """End a request on the server; one that is paused continues later after its tokens."""
        request_id = running.server_id  # it gets another one

        async def abort() -> None:
            try:
                await self._client.abort(request_id)
            except Unavailable as error:
                _log.warning("cannot abort %s: %s", request_id, error)

        task = asyncio.ensure_future(abort())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _watch(self) -> None:
        """Follow the load of the server, until it is lost."""
        try:
            await self._link.watch(self._observe)
        except (Unavailable, EngineUnusable) as error:
            self._failure.set_result(error)

    async def _observe(self, load: ServerLoad) -> None:
        if self.options.endpoint:
            self._others.observe(load, [len(r.tokens) for r in self._requests.values()])
        self._free_blocks = (load.capacity_tokens - load.used_tokens) // self.info.kv_block_tokens
        if self._server.metrics and self._polls % CACHE_POLLS == 0:
            self._cached_tokens = await self._client.cached_tokens()
        self._polls += 1


def _capabilities(server: ServerInfo, options: SglangEngineOptions) -> frozenset[Capability]:
    has = {
        Capability.SLO_PREDICTED: options.keeps_slos,
        Capability.ADAPTER: options.adapter is not None,
        Capability.LOGPROBS: True,
        Capability.STRUCTURED_OUTPUT: server.grammars,
        Capability.PREFIX_REUSE: server.prefix_cache,
        Capability.PREFIX_TRANSFER: server.prefix_cache,
        Capability.SEEDED_SAMPLING: server.seeded,
        Capability.PRIORITIES: server.priorities,
    }
    return frozenset(capability for capability, is_so in has.items() if is_so)


def config_vocab(folder: Path) -> int:
    """The size of the model's embedding. A larger token id would end the server."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    size: int = config.get_text_config().vocab_size
    return size
