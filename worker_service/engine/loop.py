"""Runs an EngineCore on its own thread behind an asyncio interface.

Commands (add, abort, export, ...) run between the thread's steps, so an abort or a cancelled stream takes effect within one
step. Requests with an SLO are answered sooner: while a step is computed, another thread adds them and lets the core decide
(`slo_admission`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from penstock.services.domain.errors import NotFound, PenstockError, RequestFailed, Unavailable
from penstock.services.domain.instances import Load
from penstock.services.event_streams import EventStream, OnTokens
from penstock.types.replies import FinishReason, Usage
from penstock.types.requests import GenerationRequest
from penstock.types.workers import EngineFinished, HandedOver, KvLayout
from penstock.worker_service.engine.core import Answer, EngineCore, StepOutput
from penstock.worker_service.engine.engine_thread import EngineThread
from penstock.worker_service.engine.given_answers import GivenAnswers
from penstock.worker_service.engine.held_tokens import OutputCoalescing
from penstock.worker_service.engine.interface import (
    Blocks,
    EngineEvents,
    EngineInfo,
    LastBlocks,
    SpeculationState,
    Stopped,
)
from penstock.worker_service.engine.runner import ModelRunner
from penstock.worker_service.grammar.compiler import GrammarCompiler
from penstock.worker_service.speculation.sources import DraftSource
from penstock.worker_service.text.encoder import EncodingAborted, PromptEncoder
from penstock.worker_service.text.request_failures import request_failed

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_Stream = EventStream[StepOutput]
_Prepared = tuple[Callable[[EngineCore], Answer], DraftSource | None]
"""What adds a request to the core, and what proposes its tokens."""


class LoopEngine:
    """An Engine with every capability, around an EngineCore that `build` creates on the engine's thread.

    hold: limits of coalescing for the tokens after the first. Each delivery wakes the event loop, and while that runs, the
    engine's thread waits for the interpreter lock.
    """

    def __init__(
        self, build: Callable[[], tuple[EngineCore, EngineInfo]], hold: OutputCoalescing | None = None
    ) -> None:
        self._thread = EngineThread(build, hold, deliver=self._deliver, fail=self._fail, ended=self._end_all)
        self._streams: dict[str, _Stream] = {}  # used by the event loop only
        self._stopped: dict[str, HandedOver] = {}  # used by the event loop only: the HandedOver of paused requests
        self._copier = ThreadPoolExecutor(1, "kv-copies")
        self._stopping = False

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
        await self._thread.start()
        self._core, self.info = self._thread.core, self._thread.info
        self.tokenizer, self.kv_layout = self._core.tokenizer, self._core.runner.kv_layout
        self._encoder = PromptEncoder(self.tokenizer, self.info.max_context_tokens)
        self._grammars = GrammarCompiler(self.tokenizer)
        self._given = GivenAnswers(self.tokenizer, self._encoder, self._row_price)

    async def close(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._encoder.close()
        await self._grammars.close()
        await self._thread.close()
        self._copier.shutdown()

    async def failed(self) -> BaseException:
        return await asyncio.shield(self._failure)

    def load(self) -> Load:
        return self._thread.load

    async def abort(self, request_id: str) -> bool:
        return self._encoder.abort(request_id) or await self._call(request_id, lambda _: self._thread.abort(request_id))

    def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> EngineEvents:
        resumed = request.resume_token_ids

        async def prepare() -> _Prepared:
            prompt = await self._encoder.encode(request.request_id, request.prompt, continued=bool(resumed))
            source = await self._given.source(request.request_id, request.draft, resumed)
            grammar = await self._grammars.compile(request, resumed)
            return lambda core: core.add(request, prompt, grammar), source

        return self._stream(request, prepare, on_tokens, during_step=request.slo is not None and request.slo.asks)

    async def prepare_entry(self, transfer_id: str, request: GenerationRequest) -> None:
        await self._encoder.encode_ahead(transfer_id, request.request_id, request.prompt)
        await self._grammars.compile(request, ())  # the compiled grammar is kept; `enter` advances it by the output

    def enter(
        self,
        transfer_id: str,
        request: GenerationRequest,
        tokens: Sequence[int],
        last: LastBlocks | None = None,
        on_tokens: OnTokens | None = None,
    ) -> EngineEvents:
        async def prepare() -> _Prepared:
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
            return lambda core: core.enter(request, prompt, transfer_id, tokens, last, grammar), source

        return self._stream(request, prepare, on_tokens)

    async def computed_tokens(self, request_id: str) -> tuple[int, ...]:
        return await self._call(request_id, lambda core: core.transfers.computed_tokens(request_id))

    async def read_kv(self, request_id: str, first_block: int, blocks: int, out: Blocks | None = None) -> Blocks:
        return await self._on_copy_thread(
            request_id,
            lambda core: core.transfers.hold(request_id, first_block, blocks),
            lambda runner, blocks_held: runner.read_blocks(blocks_held, out),
        )

    async def pause(self, request_id: str, first_block: int) -> Stopped:
        def stop(core: EngineCore) -> Stopped:
            stopped = core.transfers.pause(request_id, first_block)
            self._thread.flush(request_id)
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

        self._post(lambda: self._thread.leave(request_id))
        self._deliver([(request_id, handed_over)])
        return handed_over

    async def reserve(self, transfer_id: str, layout: KvLayout, tokens: Sequence[int], cache_salt: str = "") -> int:
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
        self, owner: str, hold: Callable[[EngineCore], Sequence[int]], copy: Callable[[ModelRunner, Sequence[int]], _T]
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

    async def _stream(
        self,
        request: GenerationRequest,
        prepare: Callable[[], Awaitable[_Prepared]],
        on_tokens: OnTokens | None,
        *,
        during_step: bool = False,
    ) -> EngineEvents:
        """The events of a request, once it is prepared. Leaving the iteration aborts it.

        during_step: it may be added to the core while a step is computed.
        """
        request_id, stream = request.request_id, _Stream()
        try:
            ask, source = await prepare()
        except EncodingAborted:
            yield EngineFinished(FinishReason.ABORTED, Usage(output_tokens=len(request.resume_token_ids)))
            return

        def begin(core: EngineCore) -> Answer:
            admitted, finished = ask(core)
            if finished is None:
                self._thread.begin(request_id, request.output_interval_s)
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
                yield event
                if isinstance(event, (EngineFinished, HandedOver)):
                    return
        finally:
            self._leave(request_id, stream)

    def _row_price(self) -> float:
        return self._core.proposals.row_price(len(self._core.scheduler.running))

    def _leave(self, request_id: str, stream: _Stream) -> None:
        """Remove a stream; abort its request if it is still running."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            with contextlib.suppress(Unavailable):
                self._post(lambda: self._thread.abort(request_id))

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
                self._streams[request_id] = stream
            if not future.cancelled():
                future.set_result(value)
            elif stream is not None:  # the caller was cancelled
                self._leave(request_id, stream)

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

        self._post(run, during_step=during_step)
        return await future

    def _post(self, command: Callable[[], object], *, during_step: bool = False) -> None:
        if self._stopping or self._failure.done():
            raise Unavailable("the engine has stopped")
        self._thread.put(command, during_step=during_step)

    def _deliver(self, outputs: Sequence[tuple[str, StepOutput]]) -> None:
        """Hand outputs to the streams of their requests; those of a request without a stream are dropped."""
        for request_id, output in outputs:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put(output)
                if isinstance(output, (EngineFinished, HandedOver, RequestFailed)):
                    del self._streams[request_id]

    def _fail(self, error: BaseException) -> None:
        if self._failure.done():
            return
        self._failure.set_result(error)
        for stream in self._streams.values():
            stream.fail(Unavailable("the engine failed"))
        self._streams.clear()

    def _end_all(self) -> None:
        for request_id in list(self._streams):
            if (finished := self._core.abort(request_id)) is not None:
                self._deliver(self._thread.gathered([(request_id, finished)]))
