"""Holds engines of workers in the test's own process after the first token of each reply.

A test that does something to a reply that runs holds its engine until that is done: however slow the machine, the reply has
not ended before.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.worker_service.engine.runner import Row, RowResult
from penstock.worker_service.engine.simulated.engine import SimulatedRunner


@contextmanager
def held_engines(
    model: str = "", runners: Sequence[type[Any]] = (SimulatedRunner,), step_s: float | None = None
) -> Iterator[threading.Event]:
    """Until the event is set, no reply gets a second token; it is set at the end of the context.

    Only the engine's thread waits: the worker sends heartbeats, is registered, and drains as usual.

    model: hold the simulated engines of this model only. runners: the classes of the engines' runners. step_s: a step waits
    for so long at most, for tests that ask the engine itself for something, which it does between two steps.
    """
    proceed = threading.Event()

    def held(run: Any) -> Any:
        def wait_and_run(runner: Any, rows: Sequence[Row]) -> list[RowResult]:
            chosen = not model or runner.kv_layout.model_digest == f"simulated-{model}"
            if chosen and any(row.offset > 0 for row in rows):
                proceed.wait(step_s)
            results: list[RowResult] = run(runner, rows)
            return results

        return wait_and_run

    with pytest.MonkeyPatch.context() as patch:
        for runner in runners:
            patch.setattr(runner, "run", held(runner.run))
        try:
            yield proceed
        finally:
            proceed.set()
