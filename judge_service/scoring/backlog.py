"""Bounds the queue of a scorer; refusals carry a retry delay."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.services.domain.errors import Overloaded, invalid

LEARN_S = 0.5  # shortest time over which the rate is measured
FIRST_RETRY_S = 0.5  # retry delay before a rate has been measured


class Backlog:
    """The answers that one scorer is scoring or that wait for it.

    An answer is refused if there are `max_answers` already, or if it could not be scored before its caller's deadline: that
    work would be wasted and delay the answers after it.
    """

    def __init__(self, max_answers: int, at_once: int, clock: Callable[[], float] = time.monotonic) -> None:
        """at_once: answers that the scorer scores concurrently; the rest wait."""
        self._max, self.at_once, self._clock = max_answers, at_once, clock
        self.answers = 0
        self._per_s: float | None = None  # measured while there was a queue
        self._measured_from: float | None = None
        self._done = 0

    def wait_s(self) -> float:
        """Expected waiting time of a new answer; 0 without a queue, or before a rate has been measured."""
        queued = self.answers - self.at_once + 1
        return queued / self._per_s if queued > 0 and self._per_s else 0.0

    @contextmanager
    def place(self, answers: int, left_s: float | None) -> Iterator[None]:
        """Reserve room for answers as long as the context lasts. left_s: time to their caller's deadline.

        Raises:
            InvalidRequest: There are more answers than the queue can hold.
            Overloaded: There is no room now, or not enough time; carries a retry delay.
        """
        if answers > self._max:
            raise invalid("items", f"at most {self._max} at once, not {answers}")
        if self.answers + answers > self._max:
            over = self.answers + answers - self._max
            raise Overloaded(f"{self.answers} answers are waiting for this scorer", self._time_of(over))
        wait_s = self.wait_s()
        if left_s is not None and wait_s > left_s:
            problem = f"the queue of {self.answers} answers takes {wait_s:.1f} s, the deadline is in {left_s:.1f} s"
            raise Overloaded(problem, wait_s - left_s)
        self.answers += answers
        try:
            yield
        finally:
            self._measure(answers)
            self.answers -= answers

    def _time_of(self, answers: int) -> float:
        return answers / self._per_s if self._per_s else FIRST_RETRY_S

    def _measure(self, done: int) -> None:
        """Measure the rate while there is a queue. Without a queue, it would be the rate of requests, not the capacity."""
        now = self._clock()
        if self.answers <= self.at_once:
            self._measured_from, self._done = None, 0
            return
        if self._measured_from is None:
            self._measured_from = now
            return
        self._done += done
        if now - self._measured_from >= LEARN_S:
            self._per_s = self._done / (now - self._measured_from)
            self._measured_from, self._done = now, 0
