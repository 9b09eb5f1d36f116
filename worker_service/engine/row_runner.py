"""Runs the rows of a step so that one that cannot be computed fails alone."""

import contextlib
from collections.abc import Callable, Sequence

from penstock.types.sampling import SamplingParams
from penstock.worker_service.engine.runner import ModelRunner, Row, RowResult
from penstock.worker_service.scheduling.blocks import BlockPool, OutOfBlocks

PROBE = SamplingParams(temperature=0.0, max_tokens=1)


class RowRunner:
    """computing: entered while the runner computes."""

    def __init__(self, runner: ModelRunner, pool: BlockPool) -> None:
        self.runner, self._pool = runner, pool
        self.computing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def run(self, rows: Sequence[Row | BaseException]) -> list[RowResult]:
        """One result for each row. An error in place of a row is that of its result."""
        results = iter(self._run([row for row in rows if isinstance(row, Row)]))
        return [next(results) if isinstance(row, Row) else RowResult(error=row) for row in rows]

    def _run(self, rows: Sequence[Row]) -> Sequence[RowResult]:
        """A step that fails is split, down to the single rows that fail."""
        if not rows:
            return []
        try:
            with self.computing():
                return self.runner.run(rows)
        except BaseException as error:
            if len(rows) == 1:
                return [RowResult(error=error)]
        half = len(rows) // 2
        return [*self._run(rows[:half]), *self._run(rows[half:])]

    def check(self, error: BaseException) -> None:
        """Check the runner after every row of a step has failed: raise `error` unless it can still compute a token.

        The token is written to a free block; without one, the next step decides.
        """
        try:
            blocks = self._pool.take(1)
        except OutOfBlocks:
            return
        try:
            (result,) = self.runner.run([Row((0,), 0, blocks, 1, PROBE, 0)])
        except BaseException:
            raise error from None
        finally:
            self._pool.release(blocks)
        if result.error is not None:
            raise error
