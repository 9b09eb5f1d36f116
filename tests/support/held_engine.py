"""Holds the simulated engines of workers in the test's own process after the first token of each reply."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from worker_service.engine.runner import Row, RowResult
from worker_service.engine.simulated.engine import SimulatedRunner


@contextmanager
def held_engines(model: str) -> Iterator[threading.Event]:
    """Until the event is set, no reply of a simulated `model` gets a second token; set at the end of the context.

    Only the engine's thread waits: the worker sends heartbeats, is registered, and drains as usual.
    """
    proceed, run = threading.Event(), SimulatedRunner.run

    def held(runner: SimulatedRunner, rows: Sequence[Row]) -> list[RowResult]:
        if runner.kv_layout.model_digest == f"simulated-{model}" and any(row.offset > 0 for row in rows):
            proceed.wait()
        return run(runner, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedRunner, "run", held)
        try:
            yield proceed
        finally:
            proceed.set()
