"""How much one scorer has to do: a bound on what waits, and refusals that say when to try again."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.domain.errors import Overloaded, invalid

LEARN_S = 0.5  # a rate is measured over at least so long
FIRST_RETRY_S = 0.5  # hint until a rate has been measured


class Backlog:
    """The answers that one scorer works on or that wait for it.

    An answer is refused where `max_answers` are here, or where those here take longer than its caller waits: to judge it
    would be work for nothing, at the cost of those behind it.
    """

    def __init__(self, max_answers: int, at_once: int, clock: Callable[[], float] = time.monotonic) -> None:
        """at_once: answers that the scorer works on together; the rest wait."""
        self._max, self._at_once, self._clock = max_answers, at_once, clock
        self._answers = 0
        self._per_s: float | None = None  # while there was a queue
        self._measured_from: float | None = None
        self._done = 0

    @property
    def answers(self) -> int:
        return self._answers

    def wait_s(self) -> float:
        """Until the scorer begins with an answer that comes now; 0 where nothing waits, or nothing is known yet."""
        queued = self._answers - self._at_once + 1
        return queued / self._per_s if queued > 0 and self._per_s else 0.0

    @contextmanager
    def place(self, answers: int, left_s: float | None) -> Iterator[None]:
        """A place for so many answers as long as the context lasts. left_s: how long their caller still waits.

        Raises:
            InvalidRequest: they are more than there is ever room for.
            Overloaded: with the time after which they would have a place, and could be judged in time.
        """
        if answers > self._max:
            raise invalid("items", f"at most {self._max} at once, not {answers}")
        if self._answers + answers > self._max:
            over = self._answers + answers - self._max
            raise Overloaded(f"{self._answers} answers are waiting for this scorer", self._time_of(over))
        wait_s = self.wait_s()
        if left_s is not None and wait_s > left_s:
            what = (
                f"{self._answers} answers, {wait_s:.1f} s of work, are before it, and its caller waits {left_s:.1f} s"
            )
            raise Overloaded(what, wait_s - left_s)
        self._answers += answers
        try:
            yield
        finally:
            self._measure(answers)
            self._answers -= answers

    def _time_of(self, answers: int) -> float:
        return answers / self._per_s if self._per_s else FIRST_RETRY_S

    def _measure(self, done: int) -> None:
        """Learn the rate, while there is a queue: without one it is what was asked for, not what can be done."""
        now = self._clock()
        if self._answers <= self._at_once:
            self._measured_from, self._done = None, 0
            return
        if self._measured_from is None:
            self._measured_from = now
            return
        self._done += done
        if now - self._measured_from >= LEARN_S:
            self._per_s = self._done / (now - self._measured_from)
            self._measured_from, self._done = now, 0
