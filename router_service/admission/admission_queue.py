"""The bounded queue for all requests: some run, some wait, and the others are refused with a time to try again."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.router_service.admission.rules import AdmissionPlaces, Ticket, TicketState
from penstock.services.domain.errors import DeadlineExceeded, Overloaded, invalid

MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
RETRY_JITTER = 0.5  # spreads retries over the hint and half as much again


class AdmissionQueue:
    """Admits requests for `max_active` places; `max_waiting` wait, by priority, then in order of arrival."""

    def __init__(self, max_active: int, max_waiting: int, jitter: random.Random | None = None) -> None:
        self._admission = AdmissionPlaces(max_active, max_waiting)
        self._turns: dict[int, asyncio.Future[None]] = {}  # by ticket
        self._jitter = jitter or random.Random()

    @property
    def active(self) -> int:
        """Number of places that are held."""
        return self._admission.active

    @property
    def waiting(self) -> int:
        """Number of places that are waited for."""
        return self._admission.waiting

    def refusal(self) -> Overloaded | None:
        """The error for a request that arrives now if any request would be refused; None if it may be admitted.

        It costs next to nothing, so it can be called before the request is read.
        """
        return self._refused(asyncio.get_running_loop().time()) if self._admission.is_full else None

    @asynccontextmanager
    async def entered(
        self, priority: int, deadline_s: float, places: int = 1, on_wait: Callable[[], None] | None = None
    ) -> AsyncIterator[Ticket]:
        """Hold `places` places, all or none, as long as the context lasts.

        on_wait: called once if the request is queued: from then on it is not refused as Overloaded.

        Entering it raises:
            InvalidRequest: more places than there are; names `n`.
            Overloaded: the queue is full.
            DeadlineExceeded: while waiting.
        """
        if places > self._admission.max_active:
            limit = self._admission.max_active
            raise invalid("n", f"{places} choices in all (n times prompts), of which at most {limit} can run at once")
        now_s = asyncio.get_running_loop().time()
        ticket = self._admission.enter(priority, places, now_s)
        if ticket.state is TicketState.GONE:
            raise self._refused(now_s)
        try:
            if ticket.state is TicketState.WAITING:
                if on_wait is not None:
                    on_wait()
                await self._turn(ticket, deadline_s)
            yield ticket
        finally:
            self._admitted(self._admission.cancel(ticket, asyncio.get_running_loop().time()))

    def leave_one(self, ticket: Ticket) -> None:
        """Give one of a ticket's places back."""
        self._admitted(self._admission.leave(ticket, 1, asyncio.get_running_loop().time()))

    def retry_after_s(self, now_s: float) -> float:
        """When to try again: the time in which the queue will be processed, with jitter."""
        spread = 1 + RETRY_JITTER * self._jitter.random()
        return min(MAX_RETRY_S, max(MIN_RETRY_S, self._admission.retry_after_s(now_s))) * spread

    def _refused(self, now_s: float) -> Overloaded:
        return Overloaded(f"{self.waiting} requests are already waiting", self.retry_after_s(now_s))

    async def _turn(self, ticket: Ticket, deadline_s: float) -> None:
        turn = self._turns[id(ticket)] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(deadline_s):
                await turn
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the request was waiting for its turn") from None
        finally:
            self._turns.pop(id(ticket), None)

    def _admitted(self, tickets: list[Ticket]) -> None:
        """Wake admitted requests. The place of one whose task is already cancelled is given to the next at once."""
        tickets = [*tickets]
        while tickets:
            ticket = tickets.pop(0)
            turn = self._turns.pop(id(ticket))
            if turn.cancelled():
                tickets += self._admission.cancel(ticket, asyncio.get_running_loop().time())
            else:
                turn.set_result(None)
