"""The ids of the requests that a router serves at this moment. No I/O."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from services.domain.errors import AlreadyRunning


class LiveRequests:
    """Refuses a second request of the same id while the first is live."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    @contextmanager
    def entered(self, request_id: str, *, resumes: bool) -> Iterator[None]:
        """The id is live as long as the context lasts. Raises as `enter` does."""
        self.enter(request_id, resumes=resumes)
        try:
            yield
        finally:
            self.leave(request_id)

    def enter(self, request_id: str, *, resumes: bool) -> None:
        """The id is live until `leave`, to be called as often as this.

        resumes: the request goes on behind tokens that its client has. It is let in beside the call that it takes over from,
        whose end this router may not have seen yet. It does not end that call: ids are chosen by clients, and one could
        name another's.

        Raises:
            AlreadyRunning: The id is live, and this request does not resume it.
        """
        if self._calls[request_id] and not resumes:
            raise AlreadyRunning(request_id)
        self._calls[request_id] += 1

    def leave(self, request_id: str) -> None:
        """One request of the id has ended."""
        self._calls[request_id] -= 1
        if not self._calls[request_id]:
            del self._calls[request_id]
