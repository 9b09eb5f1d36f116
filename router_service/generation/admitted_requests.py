"""Requests that may run: with an id that no other active request has, and a place of the admission queue."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from router_service.admission.admission_queue import AdmissionQueue, Places
from router_service.domain.events import RouterRequest
from router_service.generation.live_requests import LiveRequests
from services.domain.errors import AlreadyRunning, DeadlineExceeded, Overloaded, PenstockError


class AdmittedRequests(AbstractAsyncContextManager[Places]):
    """Requests whose ids are registered and that hold places of the queue, as long as the context lasts."""

    __slots__ = ("_live", "_live_ids", "_on_refused", "_places", "_queue", "_requests")

    def __init__(
        self,
        queue: AdmissionQueue,
        live: LiveRequests,
        requests: Sequence[RouterRequest],
        on_refused: Callable[[RouterRequest, PenstockError], None],
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """on_wait: called once if they are queued."""
        self._queue, self._live, self._requests, self._on_refused = queue, live, requests, on_refused
        self._live_ids: list[str] = []
        self._places = queue.entered(requests[0].priority, requests[0].deadline_s, len(requests), on_wait)

    async def __aenter__(self) -> Places:
        try:
            for request in self._requests:
                self._live.enter(request.request_id, resumes=request.resume is not None)
                self._live_ids.append(request.request_id)
            return await self._places.__aenter__()
        except BaseException as error:
            self._leave()
            if isinstance(error, (AlreadyRunning, Overloaded, DeadlineExceeded)):
                for request in self._requests:
                    self._on_refused(request, error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._places.__aexit__(kind, error, trace)
        self._leave()

    def _leave(self) -> None:
        for request_id in self._live_ids:
            self._live.leave(request_id)
