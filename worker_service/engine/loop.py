"""Runs an EngineCore on its own thread behind an asyncio interface.

The loop of the thread: run commands, compute a step, deliver outputs. Commands (add, abort, export, ...) run between steps,
so an abort or a cancelled stream takes effect within one step. Requests with an SLO are answered sooner: while a step is
computed, another thread adds them and lets the core decide (`slo_admission`).
"""

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from services.domain.errors import NotFound, PenstockError, RequestFailed, Unavailable
from services.domain.instances import Load
from services.domain.requests import (
    PROGRESS_TOKENS,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenFrame,
    TokenPrompt,
    TokenUsage,
)
from services.event_streams import EventStream, OnTokens
from worker_service.engine.core import EngineCore, StepOutput
from worker_service.engine.deliveries import Deliveries
from worker_service.engine.given_answers import GivenAnswers
from worker_service.engine.interface import (
    Admitted,
    Allocator,
    Blocks,
    Declined,
    DraftDistribution,
    EngineEvent,
    EngineInfo,
    Finished,
    HandedOver,
    KvLayout,
    LastBlocks,
    SpeculationState,
    Stopped,
    Verification,
)
from worker_service.engine.runner import ModelRunner
from worker_service.engine.slo_admission import SloAdmission
from worker_service.grammar import GrammarCompiler
from worker_service.request_failures import request_failed
from worker_service.speculation.sources import DraftSource
from worker_service.speculation.windows import row_price
from worker_service.text import Tokenizer
from worker_service.text.encoder import EncodingAborted, PromptEncoder

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

IDLE_WAIT_S = 0.5  # without requests, the measured throughput is still updated
HELD_WAIT_S = 0.001  # there are requests, but the allocator gave them no tokens

PATIENT_TOKENS = (
    16  # as many of a reply whose tokens may wait longer come together: `output_coalescing` joins them further
)


@dataclass(frozen=True, slots=True)
class OutputCoalescing:
    """Tokens of a reply are held until this many are there, or this much time (plus a step) has passed."""

    seconds: float
    tokens: int


@dataclass(slots=True)
class _Held:
    """Tokens of one request that wait on the engine's thread: until when, and when the last ones were handed out."""

    seconds: float
    tokens: int
    frames: list[TokenFrame] = field(default_factory=list)
    sent_at: float = -math.inf

    @property
    def count(self) -> int:
        """Number of tokens that are held."""
        return self.frames[-1].end - self.frames[0].offset if self.frames else 0


_Stream = EventStream[StepOutput]


class LoopEngine:
    """An Engine with every capability, around an EngineCore that `build` creates on the engine's thread.

    hold: limits of coalescing for the tokens behind the first. Each delivery wakes the event loop, and while that runs, the
    engine's thread waits for the interpreter lock.
    """

    def __init__(
        self, build: Callable[[], tuple[EngineCore, EngineInfo]], hold: OutputCoalescing | None = None
    ) -> None:
        self._build, self._hold = build, hold
        self._held: dict[str, _Held] = {}  # used by the thread only
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # used by the event loop only
        self._deliveries = Deliveries(self._streams)
        self._stopped: dict[str, HandedOver] = {}  # used by the event loop only: the HandedOver of paused requests
        self._load = Load()
        self._allocator: Allocator | None = None
        self._admission = SloAdmission(self._decide_during_step)
        self._copier = ThreadPoolExecutor(1, "kv-copies")
        self._stopping = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._core.tokenizer

    @property
    def kv_layout(self) -> KvLayout:
        return self._core.runner.kv_layout

    @property
    def steps(self) -> int:
        return self._core.steps

    @property
    def preemptions(self) -> int:
        return self._core.scheduler.preemptions

    @property
    def latency_correction(self) -> float | None:
        return self._core.scheduler.policy.latency_correction

    def speculation(self) -> SpeculationState:
        return self._core.proposals.state()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[BaseException] = self._loop.create_future()
        built: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(built,), name="engine", daemon=True)
        self._thread.start()
        await built
        self._encoder = PromptEncoder(self._core.tokenizer, self._info.max_context_tokens)
        self._grammars = GrammarCompiler(self._core.tokenizer, self._core.tokenizer.tool_format)
        self._given = GivenAnswers(self._core.tokenizer, self._encoder, self._row_price)

    async def close(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._encoder.close()
        self._grammars.close()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._admission.close)
        self._copier.shutdown()

    async def failed(self) -> BaseException:
        return await asyncio.shield(self._failure)

    def allocate_by(self, allocator: Allocator | None) -> None:
        self._allocator = allocator

    def load(self) -> Load:
        return self._load

    async def abort(self, request_id: str) -> bool:
        return self._encoder.abort(request_id) or await self._call(
            request_id, lambda core: self._abort(core, request_id)
        )

    async def generate(
        self, request: GenerationRequest, on_tokens: OnTokens | None = None
    ) -> AsyncGenerator[EngineEvent, None]:
        resumed = request.resume_token_ids
        try:
            prompt = await self._encoder.encode(request.request_id, request.prompt, continued=bool(resumed))
            source = await self._given.source(request.request_id, request.draft, resumed)
        except EncodingAborted:
            yield Finished(FinishReason.ABORTED, TokenUsage(output_tokens=len(resumed)))
            return
        grammar = await self._grammars.compile(request, resumed)
        async with contextlib.aclosing(
            self._stream(
                request,
                lambda core: core.add(request, prompt, grammar),
                on_tokens,
                source,
                during_step=request.slo is not None and request.slo.asks,
            )
        ) as events:
            async for event in events:  # closed at once, not by the garbage collector
                yield event

    async def prepare_entry(self, transfer_id: str, request: GenerationRequest) -> None:
        try:
            await self._encoder.encode_ahead(transfer_id, request.request_id, request.prompt)
        except EncodingAborted:
            raise NotFound("request", request.request_id) from None
        await self._grammars.compile(request, ())  # the compiled grammar is kept; `enter` advances it by the output

    async def enter(
        self,
        transfer_id: str,
        request: GenerationRequest,
        tokens: Seq[int],
        last: LastBlocks | None = None,
        on_tokens: OnTokens | None = None,
    ) -> AsyncGenerator[EngineEvent, None]:
        try:
            prompt = await self._encoder.encode_arrived(transfer_id, request.request_id, request.prompt)
            grammar = await self._grammars.compile(request, tokens[len(prompt) :])
            source = await self._given.source(request.request_id, request.draft, tokens[len(prompt) :])
        except BaseException as error:
            with contextlib.suppress(Unavailable):
                self._post(lambda: self._core.transfers.release(transfer_id))
            if isinstance(error, EncodingAborted):
                raise NotFound("request", request.request_id) from None
            raise
        async with contextlib.aclosing(
            self._stream(
                request, lambda core: core.enter(request, prompt, transfer_id, tokens, last, grammar), on_tokens, source
            )
        ) as events:
            async for event in events:
                yield event

    async def computed_tokens(self, request_id: str) -> tuple[int, ...]:
        return await self._call(request_id, lambda core: core.transfers.computed_tokens(request_id))

    async def read_kv(self, request_id: str, first_block: int, blocks: int, out: Blocks | None = None) -> Blocks:
        return await self._on_copy_thread(
            request_id,
            lambda core: core.transfers.hold(request_id, first_block, blocks),
            lambda runner, blocks_held: runner.read_blocks(blocks_held, out),
        )

    async def rehearse_read(self, out: Blocks) -> None:
        blocks = [i % self._info.kv_blocks for i in range(len(out))]
        await asyncio.wrap_future(self._copier.submit(self._core.runner.read_blocks, blocks, out))

    async def pause(self, request_id: str, first_block: int) -> Stopped:
        def stop(core: EngineCore) -> Stopped:
            stopped = core.transfers.pause(request_id, first_block)
            pending = self._held.get(request_id)
            if pending is not None and pending.frames:
                last: list[tuple[str, StepOutput]] = [(request_id, TokenFrame.joined(pending.frames))]
                self._loop.call_soon_threadsafe(self._deliveries.deliver, last)
                pending.frames, pending.sent_at = [], time.monotonic()
            return stopped

        stopped = await self._call(request_id, stop)
        self._stopped[request_id] = HandedOver(stopped.output_tokens)
        return stopped

    async def resume(self, request_id: str) -> None:
        self._stopped.pop(request_id, None)
        await self._call(request_id, lambda core: core.transfers.resume(request_id))

    async def leave(self, request_id: str) -> HandedOver:
        """Does not wait for the current step, because the reader needs this event to continue elsewhere."""
        handed_over = self._stopped.pop(request_id, None)
        if handed_over is None or request_id not in self._streams:
            raise NotFound("stopped request", request_id)

        def forget() -> None:
            self._core.leave(request_id)
            self._held.pop(request_id, None)

        self._post(forget)
        self._deliveries.deliver_of(request_id)
        self._deliveries.put(request_id, handed_over)
        return handed_over

    async def reserve(self, transfer_id: str, layout: KvLayout, tokens: Seq[int], cache_salt: str = "") -> int:
        return await self._call(
            transfer_id, lambda core: core.transfers.reserve(transfer_id, layout, tokens, cache_salt)
        )

    async def write_kv(self, transfer_id: str, first_block: int, data: Blocks) -> None:
        await self._on_copy_thread(
            transfer_id,
            lambda core: core.transfers.hold_reserved(transfer_id, first_block, len(data)),
            lambda runner, blocks_held: runner.write_blocks(blocks_held, data),
        )

    async def release(self, transfer_id: str) -> None:
        self._encoder.forget(transfer_id)
        await self._call(transfer_id, lambda core: core.transfers.release(transfer_id))

    async def _on_copy_thread(
        self, owner: str, hold: Callable[[EngineCore], Seq[int]], copy: Callable[[ModelRunner, Seq[int]], _T]
    ) -> _T:
        """Copy blocks on another thread; they are held until it has finished, even if the caller is cancelled."""

        def begin(core: EngineCore) -> Future[_T]:
            blocks_held = hold(core)
            copying = self._copier.submit(copy, core.runner, blocks_held)

            def let_go(_: object) -> None:
                with contextlib.suppress(Unavailable):
                    self._post(lambda: core.transfers.let_go(blocks_held))

            copying.add_done_callback(let_go)
            return copying

        try:
            return await asyncio.wrap_future(await self._call(owner, begin))
        except (PenstockError, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise request_failed(owner, error) from error

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
        stream = _Stream()
        verified = GenerationRequest(request_id, TokenPrompt(tuple(prefix[: len(prefix) - offset])), sampling)
        grammar = await self._grammars.compile(verified, prefix[len(prefix) - offset :])
        await self._call(
            request_id,
            lambda core: core.add_verification(request_id, prefix, draft, sampling, offset, distributions, grammar),
            stream,
        )
        try:
            event = await stream.get()
        finally:
            await self._leave(request_id, stream)
        if isinstance(event, RequestFailed):
            raise event
        if not isinstance(event, Verification):
            raise Unavailable("the verification was aborted")
        return event

    async def _stream(
        self,
        request: GenerationRequest,
        ask: Callable[[EngineCore], tuple[Admitted | Declined | None, Finished | None]],
        on_tokens: OnTokens | None,
        source: DraftSource | None,
        *,
        during_step: bool = False,
    ) -> AsyncGenerator[EngineEvent, None]:
        """The events of a request that `ask` adds to the core. Leaving the iteration aborts it.

        source: proposes its tokens. during_step: `ask` may be called while a step is computed.
        """
        request_id, stream = request.request_id, _Stream()

        def begin(core: EngineCore) -> tuple[Admitted | Declined | None, Finished | None]:
            admitted, finished = ask(core)
            if finished is None:
                self._hold_tokens(request)
                if source is not None:
                    core.proposals.attach(request_id, source)
            return admitted, finished

        admitted, finished = await self._call(request_id, begin, stream, during_step=during_step)
        try:
            if admitted is not None:  # otherwise it comes with the decision
                yield admitted
            if finished is not None:
                yield finished
                return
            if on_tokens is not None:
                stream.pass_tokens(on_tokens)
            while True:
                event = await stream.get()
                if isinstance(event, RequestFailed):
                    raise event
                assert not isinstance(event, Verification)
                yield event
                if isinstance(event, (Finished, HandedOver)):
                    return
        finally:
            await self._leave(request_id, stream)

    def _row_price(self) -> float:
        return row_price(len(self._core.scheduler.running))

    async def _leave(self, request_id: str, stream: _Stream) -> None:
        """Remove a stream; abort its request if it is still running."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            with contextlib.suppress(Unavailable):
                self._post(lambda: self._abort(self._core, request_id))

    async def _call(
        self,
        request_id: str,
        action: Callable[[EngineCore], _T],
        stream: _Stream | None = None,
        *,
        during_step: bool = False,
    ) -> _T:
        """Run `action` on the engine's thread between two steps. On success, `stream` is registered before any event.

        request_id: of the request or the transfer. during_step: it may run on another thread while a step is computed.

        Raises:
            PenstockError: Raised by `action`; any other exception becomes RequestFailed.
        """
        future: asyncio.Future[_T] = self._loop.create_future()

        def resolve(value: _T) -> None:
            if stream is not None:
                self._deliveries.deliver_of(request_id)
                self._streams[request_id] = stream
            if future.cancelled():  # the caller was cancelled
                if stream is not None:
                    self._streams.pop(request_id, None)
                    with contextlib.suppress(Unavailable):
                        self._post(lambda: self._abort(self._core, request_id))
                return
            future.set_result(value)

        def reject(error: BaseException) -> None:
            if not future.done():
                future.set_exception(error)

        def run() -> None:
            try:
                value = action(self._core)
            except PenstockError as error:
                self._loop.call_soon_threadsafe(reject, error)
            except BaseException as error:
                self._loop.call_soon_threadsafe(reject, request_failed(request_id, error))
            else:
                self._loop.call_soon_threadsafe(resolve, value)

        if during_step:
            self._admission.put(run)
            self._post(self._admission.run_commands)
        else:
            self._post(run)
        return await future

    def _post(self, command: Callable[[], object]) -> None:
        if self._stopping or self._failure.done():
            raise Unavailable("the engine has stopped")
        self._commands.put(command)

    def _decide(self) -> None:
        """Decide on the requests that have asked for an SLO and deliver the answers. On either thread."""
        if decided := self._core.decide():
            self._loop.call_soon_threadsafe(self._deliveries.deliver, self._gathered(decided))

    def _decide_during_step(self) -> None:
        try:
            self._decide()
        except BaseException as error:
            _log.exception("admission failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _abort(self, core: EngineCore, request_id: str) -> bool:
        finished = core.abort(request_id)
        if finished is not None:
            self._loop.call_soon_threadsafe(self._deliveries.deliver, self._gathered([(request_id, finished)]))
        return finished is not None

    def _hold_tokens(self, request: GenerationRequest) -> None:
        """A request has begun whose tokens may wait; `output_coalescing` joins them further. The thread's."""
        usual, interval_s = self._hold, request.output_interval_s or 0.0
        if usual is None:
            return
        if interval_s > usual.seconds:
            self._held[request.request_id] = _Held(interval_s, min(usual.tokens, PROGRESS_TOKENS))
        else:
            self._held[request.request_id] = _Held(usual.seconds, usual.tokens)

    def _gathered(self, outputs: list[tuple[str, StepOutput]]) -> list[tuple[str, StepOutput]]:
        """The outputs to deliver now; the others are held. Runs on the thread."""
        if self._hold is None:
            return outputs
        now, ready = time.monotonic(), list[tuple[str, StepOutput]]()
        for request_id, event in outputs:
            if isinstance(event, TokenFrame):
                self._held[request_id].frames.append(event)
                continue
            if isinstance(event, Admitted | Declined):
                ready.append((request_id, event))
                continue
            last = self._held.pop(request_id, None)
            if last is not None and last.frames:
                ready.append((request_id, TokenFrame.joined(last.frames)))
            ready.append((request_id, event))
        for request_id, held in self._held.items():
            if held.frames and (now - held.sent_at >= held.seconds or held.count >= held.tokens):
                ready.append((request_id, TokenFrame.joined(held.frames)))
                held.frames, held.sent_at = [], now
        return ready

    def _run(self, built: asyncio.Future[None]) -> None:
        """The main function of the thread."""
        try:
            self._core, self._info = self._build()
            self._load = self._core.load()
        except BaseException as error:
            self._loop.call_soon_threadsafe(built.set_exception, error)
            return
        self._loop.call_soon_threadsafe(built.set_result, None)
        core = self._core
        if core.scheduler.policy.keeps_slos:
            core.computing = self._admission.computing
            self._admission.start()
        try:
            worked = False
            while self._take_commands(wait_s=IDLE_WAIT_S if core.idle else 0.0 if worked else HELD_WAIT_S):
                allocation = self._allocator(core.scheduler) if self._allocator is not None else None
                before = core.steps
                if core.scheduler.policy.keeps_slos:
                    self._decide()  # the answers do not wait for the step
                outputs = self._gathered(core.step(allocation))
                worked = core.steps > before
                self._load = core.load()  # first: who has got the end of a reply does not find it in the load any more
                if outputs:
                    self._loop.call_soon_threadsafe(self._deliveries.deliver, outputs)
        except BaseException as error:
            _log.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._fail, error)
        else:
            self._loop.call_soon_threadsafe(self._end_all)

    def _take_commands(self, wait_s: float) -> bool:
        """Run the queued commands, waiting up to `wait_s` for the first; False when it is time to stop."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                if command is None:
                    return False
                self._run_command(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            if wait_s:
                self._load = self._core.load()
            return True

    @staticmethod
    def _run_command(command: Callable[[], object]) -> None:
        """Run a command. An error of one without a caller (an abort, a release of blocks) must not end the engine."""
        try:
            command()
        except BaseException:
            _log.exception("a command between two steps failed")

    def _fail(self, error: BaseException) -> None:
        if self._failure.done():
            return
        self._failure.set_result(error)
        self._deliveries.deliver_all()
        for stream in self._streams.values():
            stream.fail(Unavailable("the engine failed"))
        self._streams.clear()

    def _end_all(self) -> None:
        self._deliveries.deliver_all()
        for request_id in list(self._streams):
            finished = self._core.abort(request_id, FinishReason.ABORTED)
            if finished is not None:
                for output in self._gathered([(request_id, finished)]):
                    self._deliveries.put(*output)
