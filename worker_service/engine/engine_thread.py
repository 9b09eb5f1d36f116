"""The thread that owns an EngineCore: run commands, compute a step, deliver outputs."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from penstock.services.domain.instances import Load
from penstock.types.replies import TokenFrame
from penstock.types.workers import Admitted, Declined
from penstock.worker_service.engine.core import EngineCore, StepOutput
from penstock.worker_service.engine.held_tokens import HeldTokens, OutputCoalescing
from penstock.worker_service.engine.interface import EngineInfo
from penstock.worker_service.engine.slo_admission import SloAdmission

_log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5  # without requests, the measured throughput is still updated
HELD_WAIT_S = 0.001  # there are requests, but the policy gave them no tokens

Outputs = list[tuple[str, StepOutput]]


class EngineThread:
    """`build` creates the core on the thread. The other callbacks run on the event loop that starts it.

    hold: limits of coalescing for the tokens after the first; None delivers all at once. deliver: gets outputs. fail: gets
    the error that has ended the thread. ended: it was closed.
    """

    core: EngineCore
    info: EngineInfo

    def __init__(
        self,
        build: Callable[[], tuple[EngineCore, EngineInfo]],
        hold: OutputCoalescing | None,
        *,
        deliver: Callable[[Sequence[tuple[str, StepOutput]]], None],
        fail: Callable[[BaseException], None],
        ended: Callable[[], None],
    ) -> None:
        self._build, self._hold, self._deliver, self._fail, self._ended = build, hold, deliver, fail, ended
        self.held: dict[str, HeldTokens] = {}  # used by the thread only
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._admission = SloAdmission(self._decide_during_step)
        self.load = Load()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        built: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(built,), name="engine", daemon=True)
        self._thread.start()
        await built

    async def close(self) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._admission.close)

    def put(self, command: Callable[[], object], *, during_step: bool = False) -> None:
        """Run a command between two steps. during_step: it may run on another thread while a step is computed."""
        if during_step:
            self._admission.put(command)
            command = self._admission.run_commands
        self._commands.put(command)

    # on the thread:

    def begin(self, request_id: str, interval_s: float | None) -> None:
        """A request has been added whose tokens may be held for so long."""
        if self._hold is not None:
            self.held[request_id] = HeldTokens(self._hold, interval_s)

    def flush(self, request_id: str) -> None:
        """Deliver what is held of a request."""
        held = self.held.get(request_id)
        if held is not None and (last := held.take(time.monotonic())) is not None:
            self._loop.call_soon_threadsafe(self._deliver, [(request_id, last)])

    def leave(self, request_id: str) -> None:
        self.core.leave(request_id)
        self.held.pop(request_id, None)

    def abort(self, request_id: str) -> bool:
        if (finished := self.core.abort(request_id)) is not None:
            self._loop.call_soon_threadsafe(self._deliver, self.gathered([(request_id, finished)]))
        return finished is not None

    def gathered(self, outputs: Outputs) -> Outputs:
        """The outputs to deliver now; the others are held."""
        if self._hold is None:
            return outputs
        now, ready = time.monotonic(), list[tuple[str, StepOutput]]()
        for request_id, event in outputs:
            if isinstance(event, TokenFrame):
                self.held[request_id].add(event)
                continue
            if not isinstance(event, Admitted | Declined):
                last = self.held.pop(request_id, None)
                if last is not None and (frame := last.take(now)) is not None:
                    ready.append((request_id, frame))
            ready.append((request_id, event))
        for request_id, held in self.held.items():
            if held.due(now) and (frame := held.take(now)) is not None:
                ready.append((request_id, frame))
        return ready

    def _decide(self) -> None:
        """Decide on the requests that have asked for an SLO and deliver the answers. On either thread."""
        if decided := self.core.decide():
            self._loop.call_soon_threadsafe(self._deliver, self.gathered(decided))

    def _decide_during_step(self) -> None:
        try:
            self._decide()
        except BaseException as error:
            _log.exception("admission failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _run(self, built: asyncio.Future[None]) -> None:
        """The main function of the thread."""
        try:
            self.core, self.info = self._build()
            self.load = self.core.load()
        except BaseException as error:
            self._loop.call_soon_threadsafe(built.set_exception, error)
            return
        self._loop.call_soon_threadsafe(built.set_result, None)
        core = self.core
        if core.scheduler.policy.keeps_slos:
            core.rows.computing = self._admission.computing
            self._admission.start()
        try:
            worked = False
            while self._take_commands(wait_s=IDLE_WAIT_S if core.idle else 0.0 if worked else HELD_WAIT_S):
                before = core.steps
                if core.scheduler.policy.keeps_slos:
                    self._decide()  # the answers do not wait for the step
                outputs = self.gathered(core.step())
                worked = core.steps > before
                self.load = core.load()  # first: who has got the end of a reply does not find it in the load any more
                if outputs:
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
        except BaseException as error:
            _log.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._fail, error)
        else:
            self._loop.call_soon_threadsafe(self._ended)

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
                self.load = self.core.load()
            return True

    @staticmethod
    def _run_command(command: Callable[[], object]) -> None:
        """Run a command. An error of one without a caller (an abort, a release of blocks) must not end the engine."""
        try:
            command()
        except BaseException:
            _log.exception("a command between two steps failed")
