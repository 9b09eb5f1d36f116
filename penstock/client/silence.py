"""Finds streams on which a router has fallen silent: `SilenceWatch` decides, one watcher for each kind of client acts."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Protocol

_LATE_S = 1.0  # a check that comes this late says that this process itself stood still, and nothing of the router
_LOOK_S = 0.25  # between two looks of the thread that watches the blocking client's streams


class Cancellable(Protocol):
    """A call under way."""

    def cancel(self) -> object: ...


class SilenceWatch:
    """Silence on one stream. Only the time that its reader waits for a message counts. No I/O.

    limit_s: Asked for at every check; None: silence says nothing.
    """

    def __init__(self, limit_s: Callable[[], float | None]) -> None:
        self._limit_s = limit_s
        self._waiting_since_s: float | None = None
        self.silent = False
        """Set by the check that found the stream silent; the stream is to be cancelled then."""

    def waiting(self, now: float) -> None:
        """The reader begins to wait for a message."""
        self._waiting_since_s = now

    def heard(self) -> None:
        """The reader has a message."""
        self._waiting_since_s = None

    def limit_s(self) -> float | None:
        return self._limit_s()

    def check(self, now: float, late_s: float) -> float | None:
        """Return when to check again; None where the stream is silent, or nothing can make it so.

        late_s: How much later than planned this check comes. After a process that stood still has woken, what arrived
        meanwhile is still to be read: the silence counts anew.
        """
        limit_s, since_s = self._limit_s(), self._waiting_since_s
        if limit_s is None:
            return None
        if since_s is None:
            return now + limit_s
        if late_s > _LATE_S:
            self._waiting_since_s = since_s = now
        self.silent = now - since_s >= limit_s
        return None if self.silent else since_s + limit_s


class LoopWatcher:
    """Watches one stream of the asyncio client with one timer, which no message sets again."""

    def __init__(self, watch: SilenceWatch, call: Cancellable) -> None:
        self._watch, self._call = watch, call
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, where a limit is known; else call again when it may be."""
        limit_s = self._watch.limit_s()
        if self._timer is None and limit_s is not None:
            self._timer = self._loop.call_later(limit_s, self._check, self._loop.time() + limit_s)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self, due_s: float) -> None:
        now = self._loop.time()
        again_s = self._watch.check(now, now - due_s)
        if self._watch.silent:
            self._call.cancel()
        elif again_s is not None:
            self._timer = self._loop.call_at(again_s, self._check, again_s)


class ThreadWatcher:
    """Watches all streams of a blocking client from one thread, which runs while there are any."""

    def __init__(self) -> None:
        self._streams: dict[SilenceWatch, Cancellable] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, watch: SilenceWatch, call: Cancellable) -> None:
        with self._lock:
            self._streams[watch] = call
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock-silence", daemon=True)
                self._thread.start()

    def remove(self, watch: SilenceWatch) -> None:
        with self._lock:
            self._streams.pop(watch, None)

    def _run(self) -> None:
        looked_s = time.monotonic()
        idle = False
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            late_s, looked_s = now - looked_s - _LOOK_S, now
            with self._lock:
                streams = list(self._streams.items())
                if not streams and idle:
                    self._thread = None
                    return
                idle = not streams
            for watch, call in streams:
                watch.check(now, late_s)
                if watch.silent:
                    call.cancel()
