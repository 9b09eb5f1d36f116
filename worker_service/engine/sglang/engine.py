"""The engine around an SGLang server, which it starts or which is already running.

Requests and replies are token ids; text, stop strings and reply rules are handled here, so that a reply can continue on any
other worker of the same model. Steps and KV blocks are internal to the server, so those capabilities are not declared.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from services.background import EndProcess, end, supervise
from services.domain.errors import (
    AlreadyRunning,
    FieldProblem,
    InvalidRequest,
    NotServed,
    Overloaded,
    PenstockError,
    Unavailable,
    UnsupportedByModel,
    invalid,
)
from services.domain.instances import Load
from services.domain.randomness import DRAW, uniform
from services.domain.requests import (
    FinishReason,
    GenerationRequest,
    PositionLogprobs,
    SamplingParams,
    TokenFrame,
    TokenLogprob,
    TokenUsage,
)
from services.domain.slo import ReplyLengths, SloClass
from services.event_streams import OnTokens
from services.mesh_rules import slo_shape_problems
from services.processes import free_port
from worker_service.engine import reply_rules
from worker_service.engine.busy_share import BusyShare
from worker_service.engine.digest import model_digest
from worker_service.engine.generation_config import sampling_defaults
from worker_service.engine.interface import (
    NOT_KEPT,
    Admitted,
    Declined,
    DraftDistribution,
    EngineEvent,
    EngineInfo,
    EngineUnusable,
    Finished,
    HandedOver,
    Verification,
)
from worker_service.engine.loop import OutputCoalescing
from worker_service.engine.sglang import attach
from worker_service.engine.sglang.adapter import name_at_server
from worker_service.engine.sglang.capabilities import capabilities
from worker_service.engine.sglang.client import Piece, ServerInfo, SglangClient, server_id
from worker_service.engine.sglang.forms import FIELD, sampling_form
from worker_service.engine.sglang.launch import ServerShape
from worker_service.engine.sglang.moves import ABORTED, MOVED, MovingRequests, Running
from worker_service.engine.sglang.others import OtherClients
from worker_service.engine.sglang.server import ServerProcess, start_turn
from worker_service.engine.sglang.turns import SendQueue
from worker_service.engine.throughput import Throughput
from worker_service.request_failures import request_failed
from worker_service.scheduling import SequenceSlo
from worker_service.speculation import acceptance
from worker_service.speculation.top_k import target_distribution
from worker_service.text.encoder import EncodingAborted, PromptEncoder
from worker_service.text.hf import HfTokenizer

if TYPE_CHECKING:
    from worker_service.engine.sglang.shadow import ShadowScheduler

_log = logging.getLogger(__name__)

POLL_S = 0.5
CACHE_POLLS = 4  # number of polls between two reads of the metrics page, which is long
VERIFY_TOP = 256  # most likely tokens requested for verifying a sampled draft


@dataclass(frozen=True, slots=True)
class SglangEngineOptions:
    """folder: the model, for its tokenizer and config. model: as in the tier of the mesh file.

    max_requests: limit on concurrent requests. endpoint: a running server. launch: a server to start at `port` (0: any free
    port). Exactly one of the two is set. adapter: the folder of a LoRA adapter that all requests use. gone_s: a running
    server that does not respond for this long has failed. hold: limits of output coalescing. keeps_slos: requests are
    admitted with an SLO where a prediction of the server's steps, measured at the start, says that it can be kept.
    tightest_tpot_s: an own server whose steps with a full chunk take longer than this pace is started once more with smaller
    chunks.
    """

    folder: Path
    name: str
    endpoint: str = ""
    launch: ServerShape | None = None
    adapter: Path | None = None
    port: int = 0
    max_requests: int = 128
    max_context_tokens: int | None = None
    start_timeout_s: float = 600.0
    gone_s: float = 10.0
    hold: OutputCoalescing | None = None
    tool_format: str = "auto"
    model: str = ""
    keeps_slos: bool = False
    tightest_tpot_s: float | None = None


class SglangEngine(MovingRequests):
    """An Engine around a server."""

    def __init__(self, options: SglangEngineOptions) -> None:
        if bool(options.endpoint) == (options.launch is not None):
            raise ValueError("either endpoint or launch is required")
        self.options = options
        self._requests: dict[str, Running] = {}
        self._arriving: dict[str, asyncio.Task[None]] = {}
        self._throughput, self._busy = Throughput(time.monotonic()), BusyShare(time.monotonic)
        self._free_blocks = self._cached_tokens = 0
        self._up = self._closed = False
        self._turned = asyncio.Condition()
        self._leaving: set[asyncio.Future[None]] = set()
        self._shadow: ShadowScheduler | None = None
        self._sends = SendQueue(self._requests, self._pause, None)
        self._reply_lengths = ReplyLengths()
        self.preemptions = 0
        self.process: ServerProcess | None = None
        """The server, if this engine started it."""

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def tokenizer(self) -> HfTokenizer:
        return self._tokenizer

    @property
    def steps(self) -> int | None:
        return None

    async def start(self) -> None:
        options = self.options
        if not (options.folder / "config.json").exists():
            raise EngineUnusable(
                f"{options.folder}: no config.json: the folder of the model is required for its tokenizer"
            )
        vocab_size = await asyncio.to_thread(config_vocab, options.folder)
        self._tokenizer = await asyncio.to_thread(HfTokenizer, options.folder, vocab_size, options.tool_format)
        async with start_turn() if options.launch is not None and options.launch.kv_store else contextlib.nullcontext():
            self._server = server = await self._started(options.launch)
            if options.keeps_slos:
                self._shadow = await self._calibrated(server, vocab_size)
                self._sends = SendQueue(self._requests, self._pause, self._shadow)
                server = self._server
        self._others, self._gpus = OtherClients(), server.tp * server.pp * server.dp
        self._free_blocks = server.kv_tokens // server.page_tokens
        self._info = EngineInfo(
            engine="sglang",
            model=options.name,
            model_digest=await asyncio.to_thread(model_digest, options.folder, options.adapter),
            max_context_tokens=min(server.input_tokens, options.max_context_tokens or server.input_tokens),
            kv_blocks=self._free_blocks,
            kv_block_tokens=server.page_tokens,
            max_requests=options.max_requests,
            capabilities=frozenset(
                capabilities(server, keeps_slos=options.keeps_slos, adapted=options.adapter is not None)
            ),
            sampling_defaults=await asyncio.to_thread(sampling_defaults, options.folder),
        )
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._encoder = PromptEncoder(self._tokenizer, self._info.max_context_tokens)
        self._throughput.restart(time.monotonic())
        self._up = True
        self._poll = supervise("sglang-watch", self._watch, EndProcess(self._fail), endless=False)

    async def _started(self, shape: ServerShape | None) -> ServerInfo:
        """Start a server of this shape, or attach to one without it, and wait until it is healthy.

        Raises:
            EngineUnusable: It does not start, does not respond in time, is not one for this model or adapter, or has several
                batches where SLOs are kept.
        """
        options = self.options
        if shape is not None:
            self.process = ServerProcess(shape, options.port or free_port())
            await self.process.start()
        endpoint = self.process.endpoint if self.process is not None else options.endpoint
        self._client = SglangClient(endpoint)
        try:
            async with asyncio.timeout(options.start_timeout_s):
                await self._until_healthy()
            server = await self._client.info()
            if options.endpoint:
                await asyncio.to_thread(self._check_identity, server)
            if options.keeps_slos:
                self._check_predictable(server, endpoint)
            if options.adapter is not None:
                self._client.adapter = await asyncio.to_thread(name_at_server, server.adapters, options.adapter)
        except BaseException as error:
            await self._stop_server()
            if isinstance(error, TimeoutError):
                raise EngineUnusable(f"no SGLang server at {endpoint} after {options.start_timeout_s:g} s") from None
            raise
        return server

    async def _calibrated(self, server: ServerInfo, vocab_size: int) -> "ShadowScheduler":
        """Measure the steps of the server, which should be idle, for the prediction of SLOs.

        Raises:
            EngineUnusable: The server refuses the measurement.
        """
        from worker_service.engine.sglang.calibration import measured_latency  # numba takes a second to import
        from worker_service.engine.sglang.shadow import ServerLimits, ShadowScheduler, chunk_within

        try:
            latency = await measured_latency(self._client, server, vocab_size)
        except (Unavailable, Overloaded, InvalidRequest) as error:
            await self._stop_server()
            raise EngineUnusable(f"cannot measure the steps of the SGLang server: {error}") from error
        tpot_s, shape = self.options.tightest_tpot_s, self.options.launch
        if tpot_s is not None and shape is not None:
            chunk = chunk_within(tpot_s, latency, server)
            if chunk < server.step_tokens:
                _log.info("chunks of %d tokens instead of %d, for %g s per token", chunk, server.step_tokens, tpot_s)
                await self._stop_server()
                server = self._server = await self._started(replace(shape, max_step_tokens=chunk))
        limits = ServerLimits(server.kv_tokens, server.page_tokens, server.max_running, server.step_tokens)
        shadow = ShadowScheduler(latency, limits)
        await asyncio.to_thread(shadow.warm)
        return shadow

    @property
    def latency_correction(self) -> float | None:
        return self._shadow.correction.factor if self._shadow is not None else None

    def _check_identity(self, server: ServerInfo) -> None:
        """Raises:
        EngineUnusable: The server is of an unknown version, or serves another model.
        """
        options = self.options
        if problems := [*attach.problems(server.identity, options.folder, (options.model, options.name))]:
            raise EngineUnusable(f"the SGLang server at {options.endpoint}: {'; '.join(problems)}")

    def _check_predictable(self, server: ServerInfo, endpoint: str) -> None:
        """Raises:
        EngineUnusable: The server has several batches, so its steps cannot be predicted for SLOs.
        """
        if problems := [f"{name} 1, {problem}" for name, problem in slo_shape_problems(server.dp, server.attn_dp)]:
            raise EngineUnusable(f"the SGLang server at {endpoint}: batch_policy slo needs {'; '.join(problems)}")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._encoder.close()
        await end(self._poll, *self._arriving.values())
        for request_id in list(self._requests):
            with contextlib.suppress(Unavailable):  # its stream has ended already
                await self.abort(request_id)
        while self._requests:
            await asyncio.sleep(0.01)
        await self._stop_server()

    async def failed(self) -> BaseException:
        return await asyncio.shield(self._failure)

    async def availability(self) -> AsyncIterator[bool]:
        """As in `Interruptible`: False while the server restarts."""
        while True:
            yield (available := self._up)
            async with self._turned:
                while self._up is available:
                    await self._turned.wait()

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

    async def generate(
        self, request: GenerationRequest, on_tokens: OnTokens | None = None
    ) -> AsyncGenerator[EngineEvent, None]:
        received_s, resumed = time.monotonic(), request.resume_token_ids
        try:
            prompt = await self._encoder.encode(request.request_id, request.prompt, continued=bool(resumed))
        except EncodingAborted:
            yield Finished(FinishReason.ABORTED, TokenUsage(output_tokens=len(resumed)))
            return
        self._form(request)  # before the request is admitted
        most = reply_rules.reply_room(request, prompt, self._info.max_context_tokens, self._tokenizer)
        text = reply_rules.resumed_text(request, self._tokenizer)
        output = list(request.resume_token_ids)
        reason = None
        if output:
            reason = reply_rules.end_reason(text, output[-1], len(output), most, request.sampling, self._tokenizer)
        with self._place(request.request_id, [*prompt, *output], len(prompt)) as running:
            best_effort = True
            if self._shadow is not None and reason is None:
                predicted = self._reply_lengths.predict(len(output), most)
                running.slo = SequenceSlo.requested(request.slo, received_s, predicted)
                if running.slo is not None:
                    best_effort = await self._sends.admit(running) is SloClass.BEST_EFFORT
                    if best_effort and request.decline_unkept_slo:
                        yield Declined(NOT_KEPT)
                        yield Finished(FinishReason.DECLINED, TokenUsage(len(prompt), 0, len(output)))
                        return
            yield Admitted(len(prompt), most, best_effort)
            cached, preemptions, compute_s = 0, 0, 0.0
            if reason is None:
                pieces = self._pieces(request, running, most)
                at_work, entered = True, self._busy.enter()
                try:
                    async with contextlib.aclosing(pieces):
                        async for piece in pieces:
                            at_work = piece.finish is None
                            if piece is MOVED:
                                break
                            cached = max(cached, min(piece.cached_tokens, len(prompt)))
                            preemptions = max(preemptions, piece.retractions)
                            first, ids, text_out = len(output), list[int](), ""
                            for token in piece.token_ids:
                                ids.append(token)
                                text_out += text.push(token)
                                reason = reply_rules.end_reason(
                                    text, token, first + len(ids), most, request.sampling, self._tokenizer
                                )
                                if reason is not None:
                                    break
                            if reason is None and piece.finish is not None:
                                reason = FinishReason.ABORTED if piece.finish == "abort" else FinishReason(piece.finish)
                            if reason is not None:
                                text_out += text.finish()
                            output += ids
                            running.tokens += ids
                            running.computing = True
                            if ids:
                                self._sends.arrived(running, len(ids))
                            self._throughput.add(len(ids), time.monotonic())
                            if ids or text_out:
                                frame = TokenFrame(first, tuple(ids), text_out, self._logprobs(ids, piece))
                                if on_tokens is None:
                                    yield frame
                                else:
                                    on_tokens(frame)
                            if reason is not None:
                                break
                except (Unavailable, Overloaded):
                    at_work = False
                    if not running.aborted:
                        raise
                    reason = FinishReason.ABORTED
                except InvalidRequest as error:
                    at_work = False
                    if request.has_form and error.problems[0].field == "request":
                        raise invalid(FIELD, error.problems[0].problem) from error
                    raise
                except (PenstockError, asyncio.CancelledError, GeneratorExit):
                    raise
                except BaseException as error:  # text or logprobs that cannot be computed, an unexpected response
                    raise request_failed(request.request_id, error) from error
                finally:
                    compute_s = self._busy.leave(entered) * self._gpus
                    self.preemptions += preemptions + running.preemptions
                    if at_work:  # a stop string, or the caller has left: the server is still generating
                        self._give_up(running.server_id)
                if reason is None and not running.moved:
                    raise Unavailable("the SGLang server ended the stream early")
            usage = TokenUsage(len(prompt), cached, len(output), compute_s=compute_s)
            preemptions += running.preemptions
        if reason is None:
            yield HandedOver(len(output))
            return
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._reply_lengths.add(len(output))
        yield Finished(reason, usage, text.stopped_by, preemptions)

    async def verify(
        self,
        request_id: str,
        prefix: Seq[int],
        draft: Seq[int],
        sampling: SamplingParams,
        *,
        offset: int = 0,
        distributions: Seq[DraftDistribution] = (),
    ) -> Verification:
        """As in `Verifying`.

        The server reports its most likely tokens at every position of a prompt. That suffices for greedy decoding; a sampled
        draft needs all tokens in the top-p set.

        Raises:
            NotServed: A sampled draft has no distributions, or needs more tokens than the server reports.
        """
        context = self._info.max_context_tokens
        reply_rules.check_draft(prefix, draft, offset, distributions, context, self._tokenizer.vocab_size)
        if sampling.structured_output is not None:
            raise NotServed("a draft of a reply with a form: SGLang tells its most likely tokens without one")
        if sampling.penalizes or sampling.logit_bias:
            raise NotServed("a draft of a reply with penalties or biases: SGLang reports logprobs without them")
        if not sampling.greedy and not distributions:
            raise NotServed("a sampled draft without its distributions: SGLang uses its own random numbers")
        vocab_size = self._tokenizer.vocab_size
        with self._place(request_id, [*prefix, *draft], len(prefix) - offset) as running:
            top = 1 if sampling.greedy else min(VERIFY_TOP, vocab_size)
            rows = await self._client.top_tokens(running.server_id, prefix, draft, top, self._priority(0))
        if not distributions:
            return Verification(*acceptance.matching(draft, [row[0][0] for row in rows]))
        target = target_distribution(rows, vocab_size, sampling)
        if target is None:
            raise NotServed(f"top-p keeps more than the {top} most likely tokens, which are all that SGLang reports")
        seed, positions = sampling.seed or 0, range(offset, offset + len(draft) + 1)
        accepted, token = acceptance.rejection(
            draft,
            target,
            [(d.token_ids, d.probabilities) for d in distributions],
            np.array([uniform(seed, position, DRAW + 1) for position in positions]),
            np.array([uniform(seed, position, DRAW) for position in positions]),
        )
        return Verification(accepted, token)

    @contextlib.contextmanager
    def _place(self, request_id: str, tokens: list[int], prompt_tokens: int) -> Iterator[Running]:
        """Register a request.

        Raises:
            Unavailable: The engine has stopped, or the server is down.
            AlreadyRunning: A request with this id is in the engine.
            Overloaded: The limit on requests is reached.
        """
        if self._closed or not self._up:
            raise Unavailable("the engine has stopped" if self._closed else "the SGLang server is down")
        if request_id in self._requests:
            raise AlreadyRunning(request_id)
        if len(self._requests) >= self.options.max_requests:
            raise Overloaded(f"{len(self._requests)} requests are already running here", 1.0)
        self._requests[request_id] = running = Running(tokens, prompt_tokens, server_id(request_id))
        try:
            yield running
        finally:
            del self._requests[request_id]
            self._sends.advance()

    def _sampling(self, sampling: SamplingParams, most: int, interval_s: float | None) -> dict[str, Any]:
        """interval_s: how long tokens may be held, if longer than the default."""
        parameters: dict[str, Any] = {
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": most,
            "ignore_eos": sampling.ignore_eos,
            "stream_interval": self._tokens_per_event(interval_s),
        }
        if sampling.seed is not None and not sampling.greedy:
            parameters["sampling_seed"] = sampling.seed & 0x7FFFFFFF
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"):
            parameters[name] = getattr(sampling, name)
        if sampling.logit_bias:
            parameters["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if sampling.stop_token_ids:
            parameters["stop_token_ids"] = sampling.stop_token_ids
        return parameters

    def _form(self, request: GenerationRequest) -> dict[str, Any]:
        """The form of the reply as sampling parameters of the server; empty if it has none.

        Raises:
            UnsupportedByModel: The model, or the server as it was started, cannot keep it.
        """
        form = sampling_form(request, self._tokenizer.tool_format)
        if form and not self._server.grammars:
            raise UnsupportedByModel(
                FieldProblem(FIELD, "this SGLang server was started without a tokenizer or a grammar backend")
            )
        return form

    def _tokens_per_event(self, interval_s: float | None) -> int:
        """Tokens per event after the first: as many as one stream generates in the time that they may be held."""
        hold, running = self.options.hold, sum(request.computing for request in self._requests.values())
        if hold is None or not running:
            return 1
        wait_s = max(hold.seconds, interval_s or 0.0)
        return max(1, min(hold.tokens, int(wait_s * self._throughput.per_second(time.monotonic()) / running)))

    def _priority(self, priority: int) -> int | None:
        return priority if self._server.priorities else None

    async def _wait_turn(self, running: Running) -> bool:
        return await self._sends.turn(running)

    def _left_server(self, running: Running) -> None:
        self._sends.left(running)

    def _pause(self, running: Running) -> None:
        """End a request on the server; it continues later behind its tokens."""
        self._give_up(running.server_id)

    def _give_up(self, request_id: str) -> None:
        async def abort() -> None:
            try:
                await self._client.abort(request_id)
            except Unavailable as error:
                _log.warning("cannot abort %s: %s", request_id, error)

        task = asyncio.ensure_future(abort())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _logprobs(self, ids: list[int], piece: Piece) -> tuple[PositionLogprobs, ...]:
        def one(token: int, value: float) -> TokenLogprob:
            return TokenLogprob(token, value, self._tokenizer.token_bytes(token))

        return tuple(
            PositionLogprobs(one(token, value), tuple(one(t, v) for t, v in top))
            for token, (value, top) in zip(ids, piece.logprobs, strict=False)
        )

    async def _until_healthy(self) -> None:
        while not await self._client.healthy():
            if self.process is not None and self.process.lost:
                raise EngineUnusable("the SGLang server ends whenever it is started; see its log above")
            await asyncio.sleep(POLL_S)

    async def _stop_server(self) -> None:
        await asyncio.gather(*self._leaving)
        await self._client.close()
        if self.process is not None:
            await self.process.stop()

    async def _watch(self) -> None:
        """Monitor the server.

        If it has died or is silent for `gone_s`, restart an own server, or fail with an external one.
        """
        loop, polls, restarts = asyncio.get_running_loop(), 0, 0
        answered_at = loop.time()
        while True:
            try:
                load = await self._client.load()
                answered_at = loop.time()
                if self.options.endpoint:
                    self._others.observe(load, [len(r.tokens) for r in self._requests.values()])
                self._free_blocks = (load.capacity_tokens - load.used_tokens) // self._info.kv_block_tokens
                if self._server.metrics and polls % CACHE_POLLS == 0:
                    self._cached_tokens = await self._client.cached_tokens()
                polls += 1
            except Unavailable as error:
                silent = loop.time() - answered_at > self.options.gone_s
                if self.process is None:
                    if silent:
                        self._fail(error)
                        return
                elif silent or self.process.pid is None or self.process.restarts > restarts:
                    _log.warning("the SGLang server is down: %s", error)
                    await self._turn(up=False)
                    if silent:
                        self.process.kill()
                    try:
                        await self._until_healthy()
                    except EngineUnusable as lost:
                        self._fail(lost)
                        return
                    restarts, answered_at = self.process.restarts, loop.time()
                    await self._turn(up=True)
            await asyncio.sleep(POLL_S)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    async def _turn(self, *, up: bool) -> None:
        async with self._turned:
            self._up = up
            self._turned.notify_all()


def config_vocab(folder: Path) -> int:
    """The size of the model's embedding. A larger token id would end the server."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    size: int = config.get_text_config().vocab_size
    return size
