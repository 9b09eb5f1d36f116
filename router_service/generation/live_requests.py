"""The ids of the active requests of a router. No I/O."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.services.domain.errors import AlreadyRunning


class LiveRequests:
    """Refuses a second request with the id of an active one."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    @contextmanager
    def entered(self, request_id: str, *, resumes: bool) -> Iterator[None]:
        """Register an id as long as the context lasts.

        resumes: the request continues after tokens that its client has. It is accepted while the call that it replaces is
        still registered, whose end this router may not have seen yet. It does not end that call: ids are chosen by clients,
        and one could name another's.

        Raises:
            AlreadyRunning: The id is registered, and this request does not resume it.
        """
        if self._calls[request_id] and not resumes:
            raise AlreadyRunning(request_id)
        self._calls[request_id] += 1
        try:
            yield
        finally:
            self._calls[request_id] -= 1
            if not self._calls[request_id]:
                del self._calls[request_id]
