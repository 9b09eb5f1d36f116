"""Coalesces output tokens into frames: the first tokens of a reply are sent at once, later ones together."""

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from services.domain.requests import PROGRESS_TOKENS, TokenFrame

MAX_INTERVAL_S = 1.0
"""Limit on the time that tokens are held, regardless of the caller's: they are lost if the worker dies."""
MAX_FRAME_TOKENS = 512
"""Frame size of a reply whose tokens may be held longer; its second frame has at most PROGRESS_TOKENS."""
SLACK = 0.25
"""Fraction of the interval by which tokens may be sent early, together with others, to save messages."""
HEARTBEAT_SWEEPS = 4  # per `heartbeat_s`: a heartbeat is late by at most a quarter

Emit = Callable[[TokenFrame | None], None]


@dataclass(frozen=True, slots=True)
class CoalescingLimits:
    """interval_s, tokens: limits of a frame. heartbeat_s: a reply without output for this long emits None."""

    interval_s: float
    tokens: int
    heartbeat_s: float


class OutputCoalescer:
    """The output of all replies of a worker: one timer for all held frames, one sweep for all heartbeats."""

    def __init__(self, limits: CoalescingLimits) -> None:
        self._limits = limits
        self._open: set[CoalescedOutput] = set()
        self._waiting: dict[CoalescedOutput, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._sweep: asyncio.TimerHandle | None = None

    def output(
        self, emit: Emit, on_error: Callable[[Exception], None], interval_s: float | None = None
    ) -> "CoalescedOutput":
        """The output of one reply, open as long as the context lasts.

        emit: called with each frame, and with None after `heartbeat_s` without output. on_error: called with an exception of
        `emit`; nothing is emitted after it. interval_s: how long tokens may be held, if longer than the default.
        """
        usual = self._limits
        if interval_s is None or interval_s <= usual.interval_s:
            return CoalescedOutput(self, emit, on_error, usual.interval_s, usual.tokens, usual.tokens)
        interval_s = min(interval_s, MAX_INTERVAL_S)
        return CoalescedOutput(self, emit, on_error, interval_s, PROGRESS_TOKENS, MAX_FRAME_TOKENS)

    def opened(self, output: "CoalescedOutput") -> None:
        self._open.add(output)
        if self._sweep is None:
            self._sweep_later()

    def closed(self, output: "CoalescedOutput") -> None:
        self._open.discard(output)
        self._waiting.pop(output, None)
        if not self._open:
            for timer in (self._timer, self._sweep):
                if timer is not None:
                    timer.cancel()
            self._timer, self._timer_s, self._sweep = None, math.inf, None

    def wait(self, output: "CoalescedOutput") -> None:
        """Schedule the flush of an output."""
        self._waiting[output] = None
        if output.due_s < self._timer_s:
            self._set_timer(output.due_s)

    def left(self, output: "CoalescedOutput") -> None:
        """Handle an output without held tokens."""
        self._waiting.pop(output, None)

    def _set_timer(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = when_s
        self._timer = asyncio.get_running_loop().call_at(when_s, self._flush_due) if when_s < math.inf else None

    def _flush_due(self) -> None:
        now = asyncio.get_running_loop().time()
        for output in [output for output in self._waiting if output.early_s <= now]:
            output.flush()
        self._set_timer(min((output.due_s for output in self._waiting), default=math.inf))

    def _sweep_later(self) -> None:
        interval_s = self._limits.heartbeat_s / HEARTBEAT_SWEEPS
        self._sweep = asyncio.get_running_loop().call_later(interval_s, self._heartbeats)

    def _heartbeats(self) -> None:
        silent_since_s = asyncio.get_running_loop().time() - self._limits.heartbeat_s
        for output in [output for output in self._open if output.sent_s <= silent_since_s]:
            output.heartbeat()
        self._sweep_later()


class CoalescedOutput(AbstractContextManager["CoalescedOutput"]):
    """The output of one reply. Held tokens are sent when the context ends, unless it is cancelled.

    sent_s: time of the last output. due_s: when held tokens must be sent; from early_s on they may be sent with others. All
    times are on the event loop's clock.
    """

    __slots__ = (
        "_closed",
        "_coalescer",
        "_emit",
        "_frames",
        "_interval_s",
        "_loop",
        "_max_tokens",
        "_on_error",
        "_then_tokens",
        "_tokens",
        "due_s",
        "early_s",
        "sent_s",
    )

    def __init__(
        self,
        coalescer: OutputCoalescer,
        emit: Emit,
        on_error: Callable[[Exception], None],
        interval_s: float,
        max_tokens: int,
        then_tokens: int,
    ) -> None:
        """max_tokens: of the second frame. then_tokens: of later frames."""
        self._coalescer, self._emit, self._on_error = coalescer, emit, on_error
        self._interval_s, self._max_tokens, self._then_tokens = interval_s, max_tokens, then_tokens
        self._loop = asyncio.get_running_loop()
        self._frames: list[TokenFrame] = []
        self._tokens = 0
        self._closed = False
        self.sent_s = self._loop.time()
        self.due_s = self.early_s = -math.inf

    def __enter__(self) -> "CoalescedOutput":
        self._coalescer.opened(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Exception):
            self.flush()
        self._closed = True
        self._coalescer.closed(self)

    def add(self, frame: TokenFrame) -> None:
        """Add the next tokens, which are sent now or when they are due."""
        self._frames.append(frame)
        self._tokens += len(frame.token_ids)
        if self._tokens >= self._max_tokens or self._loop.time() >= self.early_s:
            self.flush()
        elif len(self._frames) == 1:
            self._coalescer.wait(self)

    def flush(self) -> None:
        """Send the held tokens now."""
        if not self._frames:
            return
        if self.due_s > -math.inf:
            self._max_tokens = self._then_tokens
        now, frames = self._loop.time(), self._frames
        self._frames, self._tokens, self.sent_s = [], 0, now
        self.due_s = now + self._interval_s
        self.early_s = self.due_s - SLACK * self._interval_s
        self._coalescer.left(self)
        self._say(TokenFrame.joined(frames))

    def heartbeat(self) -> None:
        self.sent_s = self._loop.time()
        self._say(None)

    def _say(self, frame: TokenFrame | None) -> None:
        if self._closed:
            return
        try:
            self._emit(frame)
        except Exception as error:
            self._closed = True
            self._on_error(error)
