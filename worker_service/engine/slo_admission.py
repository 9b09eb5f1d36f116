"""Answers requests with an SLO while the engine's thread computes a step.

A step may take a tenth of a second; whether a promise can be kept is known within a millisecond. So new requests with an SLO
are added and decided on by a second thread, while the engine's thread is inside the runner and touches nothing else. Between
two steps the engine's thread does the same itself.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GATHER_S, PAUSE_S = 0.002, 0.0005
"""Requests of a burst are decided on together, which admits more of them than one decision for each: those that arrive within
GATHER_S of the first, up to a pause of PAUSE_S without a new one."""


class SloAdmission:
    """Commands that add requests, and the thread that runs them during steps."""

    def __init__(self, decide: Callable[[], object]) -> None:
        """decide: decides on the added requests and delivers the answers; called by the second thread."""
        self._decide = decide
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held by the thread that uses the core, around the steps' computation
        self._computing = False
        self._wake = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="slo-admission", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. No step may be computed any more."""
        self._closing = True
        self._wake.release()
        if self._thread is not None:
            self._thread.join()

    def put(self, command: Callable[[], object]) -> None:
        """Queue a command. It must not raise."""
        self._commands.put(command)
        self._wake.release()

    def run_commands(self) -> bool:
        """Run the queued commands; return whether there were any. Called by the thread that may use the core."""
        ran = False
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return ran
            command()
            ran = True

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The engine's thread is inside the runner as long as the context lasts; a decision that has begun is waited for."""
        with self._lock:
            self._computing = True
        if not self._commands.empty():  # they arrived while the step was planned
            self._wake.release()
        try:
            yield
        finally:
            with self._lock:
                self._computing = False

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._closing:
                return
            if self._commands.empty():
                continue
            self._gather()
            with self._lock:
                if self._computing and self.run_commands():
                    self._decide()

    def _gather(self) -> None:
        """Wait for the rest of a burst."""
        ends_s, waiting = time.monotonic() + GATHER_S, 0
        while self._commands.qsize() > waiting and time.monotonic() < ends_s:
            waiting = self._commands.qsize()
            time.sleep(PAUSE_S)
