"""Holds an engine of our own back between two steps, or within one, so that a test decides what happens meanwhile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.worker_service.engine.loop import LoopEngine
from penstock.worker_service.scheduling.batching import BatchScheduler
from penstock.worker_service.scheduling.steps import StepInProgress

LIMIT_S = 60


def held(engine: LoopEngine, when: Callable[[BatchScheduler], bool]) -> Callable[[], None]:
    """Give no tokens in steps before which `when` is true; call the result to let the engine run freely again."""
    policy = engine._core.scheduler.policy
    plan = policy.plan

    def gated(step: StepInProgress, now_s: float) -> None:
        if not when(step.scheduler):
            plan(step, now_s)

    def release() -> None:
        policy.plan = plan  # type: ignore[method-assign]

    policy.plan = gated  # type: ignore[method-assign]
    return release


class StepGate:
    """Holds an engine's steps inside its runner until they are let through."""

    def __init__(self, engine: LoopEngine) -> None:
        self._run, self._open = engine._core.runner.run, threading.Event()
        self._open.set()
        self.inside = threading.Event()
        engine._core.runner.run = self._gated  # type: ignore[method-assign]

    def _gated(self, rows: Any) -> Any:
        if not self._open.is_set():
            self.inside.set()
            assert self._open.wait(LIMIT_S), "nobody opens the gate"
        return self._run(rows)

    def close(self) -> None:
        self.inside.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@contextmanager
def step_gate(engine: LoopEngine) -> Iterator[StepGate]:
    """An open gate; it is open again when the context ends."""
    gate = StepGate(engine)
    try:
        yield gate
    finally:
        gate.open()
