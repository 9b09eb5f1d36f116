"""Reads streams, and detects those on which a router has become silent.

`SilenceWatch` decides; each kind of client has a watcher that acts, and a function that reads.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, Protocol

import grpc
from grpc import aio

from penstock.client import errors

_LATE_S = 1.0  # a check this late shows that this process was suspended, not that the router is silent
_CHECK_S = 0.25  # between two checks of the thread that watches the streams of the blocking client


class Cancellable(Protocol):
    """An active call."""

    def cancel(self) -> object: ...


class SilenceWatch:
    """Measures silence on one stream, while its reader waits for a message. No I/O.

    limit_s: Called at every check; None: no limit.
    """

    def __init__(self, limit_s: Callable[[], float | None]) -> None:
        self.limit_s = limit_s
        self._waiting_since_s: float | None = None
        self.silent = False
        """Set by the check that finds the stream silent; the stream should then be cancelled."""

    def waiting(self, now: float) -> None:
        """The reader starts to wait for a message."""
        self._waiting_since_s = now

    def heard(self) -> None:
        """The reader has received a message."""
        self._waiting_since_s = None

    def check(self, now: float, late_s: float) -> float | None:
        """Return when to check again; None if the stream is silent or has no limit.

        late_s: Delay of this check. A process that was suspended has not read yet what arrived meanwhile, so the measurement
        starts again.
        """
        limit_s, since_s = self.limit_s(), self._waiting_since_s
        if limit_s is None:
            return None
        if since_s is None:
            return now + limit_s
        if late_s > _LATE_S:
            self._waiting_since_s = since_s = now
        self.silent = now - since_s >= limit_s
        return None if self.silent else since_s + limit_s


class LoopWatcher:
    """Watches one stream of the asyncio client with one timer, which messages do not restart."""

    def __init__(self, watch: SilenceWatch, call: Cancellable) -> None:
        self._watch, self._call = watch, call
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start, if the limit is known; otherwise call again later."""
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
    """Watches all streams of a blocking client with one thread, which runs while there are streams."""

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
        checked_s = time.monotonic()
        idle = False
        while True:
            time.sleep(_CHECK_S)
            now = time.monotonic()
            late_s, checked_s = now - checked_s - _CHECK_S, now
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


_THREADS = ThreadWatcher()


async def read_in_loop(
    call: Any, limit_s: Callable[[], float | None], is_closed: Callable[[], bool]
) -> AsyncGenerator[Any, None]:
    """Yield the responses of a call of the asyncio client; cancel it at the end. limit_s: see SilenceWatch.

    Raises:
        PenstockError: The call failed, the router was silent, or the client has been closed.
    """
    watch = SilenceWatch(limit_s)
    watcher, cancelling = LoopWatcher(watch, call), _cancelling()
    try:
        watcher.start()
        watch.waiting(time.monotonic())
        async for response in call:
            watch.heard()
            yield response
            watcher.start()  # the response may have announced the limit
            watch.waiting(time.monotonic())
    except asyncio.CancelledError:
        # gRPC also raises this in the reader when the call was cancelled, not the reader's task.
        if _cancelling() > cancelling:
            raise
        if is_closed():
            raise errors.client_closed() from None
        if not watch.silent:
            raise
        raise errors.silent(watch.limit_s() or 0.0) from None
    except aio.AioRpcError as error:
        raise errors.from_rpc(error) from error
    finally:
        watcher.stop()
        call.cancel()


def _cancelling() -> int:
    """Number of pending cancellation requests of the current task."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def read_in_thread(
    call: Any, limit_s: Callable[[], float | None], is_closed: Callable[[], bool]
) -> Generator[Any, None, None]:
    """As `read_in_loop`, for the blocking client."""
    watch = SilenceWatch(limit_s)
    watch.waiting(time.monotonic())
    _THREADS.add(watch, call)
    try:
        for response in call:
            watch.heard()
            yield response
            watch.waiting(time.monotonic())
    except grpc.RpcError as error:
        if is_closed():
            raise errors.client_closed() from error
        if watch.silent:
            raise errors.silent(watch.limit_s() or 0.0) from error
        raise errors.from_rpc(error) from error
    finally:
        _THREADS.remove(watch)
        call.cancel()
