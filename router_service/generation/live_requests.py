"""The ids of the active requests of a router. No I/O."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from services.domain.errors import AlreadyRunning


class LiveRequests:
    """Refuses a second request with the id of an active one."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    @contextmanager
    def entered(self, request_id: str, *, resumes: bool) -> Iterator[None]:
        """Register the id as long as the context lasts. Raises as `enter` does."""
        self.enter(request_id, resumes=resumes)
        try:
            yield
        finally:
            self.leave(request_id)

    def enter(self, request_id: str, *, resumes: bool) -> None:
        """Register an id until `leave`, which must be called once for each call of this.

        resumes: the request continues after tokens that its client has. It is accepted while the call that it replaces is
        still registered, whose end this router may not have seen yet. It does not end that call: ids are chosen by clients,
        and one could name another's.

        Raises:
            AlreadyRunning: The id is registered, and this request does not resume it.
        """
        if self._calls[request_id] and not resumes:
            raise AlreadyRunning(request_id)
        self._calls[request_id] += 1

    def leave(self, request_id: str) -> None:
        """One request with this id has ended."""
        self._calls[request_id] -= 1
        if not self._calls[request_id]:
            del self._calls[request_id]
