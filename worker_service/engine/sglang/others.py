"""The load of a server by clients other than this worker, from the server's own counts. No I/O.

Placement must not take a server for idle because its load comes from elsewhere.
"""

from collections.abc import Sequence

from penstock.worker_service.engine.sglang.client import ServerLoad


class OtherClients:
    """Requests of other clients: the difference between the server's counts and this worker's own requests.

    The two are not read at the same instant, so a request of this worker that has just begun or ended could count as
    another's. Only what two polls in a row show is counted. running, waiting: requests. tokens_each: mean tokens of one.
    """

    def __init__(self) -> None:
        self.running = self.waiting = self.tokens_each = 0
        self._previous = 0

    def observe(self, load: ServerLoad, own_tokens: Sequence[int]) -> None:
        """Take in a poll. own_tokens: lengths of this worker's requests."""
        current = max(0, load.running + load.waiting - len(own_tokens))
        requests, self._previous = min(current, self._previous), current
        self.waiting = min(load.waiting, requests)
        self.running = requests - self.waiting
        used = max(0, load.used_tokens - sum(own_tokens))
        self.tokens_each = max(1, used // self.running) if self.running else 1
