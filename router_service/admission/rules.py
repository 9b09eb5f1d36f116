"""Which requests run, wait, or are refused. No I/O and no clock: the caller passes the time.

A request needs one place, or several at once (the choices of one HTTP request). Order: priority, then arrival. No request
overtakes the first in the queue, so one that needs many places gets them eventually; waiting requests hold no places.
"""

import enum
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

INITIAL_HOLD_S = 1.0  # estimate of how long a place is held, before any was given back
MIN_WINDOW = 64  # minimal number of past places in the mean time


class TicketState(enum.Enum):
    WAITING = "waiting"
    ADMITTED = "admitted"
    GONE = "gone"
    """Refused, cancelled or left."""


@dataclass(slots=True, order=True)
class Ticket:
    """One request at the queue; tickets are ordered by turn."""

    rank: tuple[int, int]
    places: int = field(compare=False)
    state: TicketState = field(default=TicketState.WAITING, compare=False)
    admitted_at_s: float = field(default=0.0, compare=False)


class HoldTime:
    """How long a place is held: the mean over the last places given back, so idle times do not count.

    If the mean age of the places still held is larger, it is that: the time grows while no place is given back.
    """

    def __init__(self, max_active: int) -> None:
        self._held_s: deque[float] = deque([INITIAL_HOLD_S] * max_active, maxlen=max(MIN_WINDOW, max_active))
        self._active, self._starts_s = 0, 0.0  # places held, and the sum of the times at which they were taken

    def taken(self, places: int, now_s: float) -> None:
        self._active += places
        self._starts_s += places * now_s

    def left(self, places: int, since_s: float, now_s: float) -> None:
        """Places taken at `since_s` have been given back."""
        self._active -= places
        self._starts_s -= places * since_s
        self._held_s.extend([now_s - since_s] * places)

    def mean_s(self, now_s: float) -> float:
        age_s = now_s - self._starts_s / self._active if self._active else 0.0
        return max(age_s, sum(self._held_s) / len(self._held_s))


class AdmissionPlaces:
    """At most `max_active` places are held and `max_waiting` waited for.

    Invariant: `active` and `waiting` are the sums of places of admitted and waiting tickets; the first waiting does not fit.
    """

    def __init__(self, max_active: int, max_waiting: int) -> None:
        self.max_active, self.max_waiting = max_active, max_waiting
        self.active = self.waiting = 0
        self._hold_time = HoldTime(max_active)
        self._heap: list[Ticket] = []  # with tickets that are gone, at most as many as are waiting
        self._waiting_tickets = 0
        self._arrivals = itertools.count()

    @property
    def is_full(self) -> bool:
        """Whether any request that comes now is refused, whatever its priority and the places it needs."""
        return self.active >= self.max_active and self.waiting >= self.max_waiting

    def enter(self, priority: int, places: int, now_s: float) -> Ticket:
        """Add a request: it waits, or is admitted or refused at once; see the state of its ticket.

        Raises:
            ValueError: It needs more places than there are.
        """
        if not 1 <= places <= self.max_active:
            raise ValueError(f"{places} places of {self.max_active}")
        ticket = Ticket((-priority, next(self._arrivals)), places)
        if not self._heap and self.active + places <= self.max_active:  # as usual: none waits
            self._take(ticket, now_s)
            return ticket
        heapq.heappush(self._heap, ticket)
        self.waiting += places
        self._waiting_tickets += 1
        self._admit(now_s)
        if ticket.state is TicketState.WAITING and self.waiting > self.max_waiting:
            self._remove(ticket)
        return ticket

    def leave(self, ticket: Ticket, places: int, now_s: float) -> list[Ticket]:
        """Give back some places of an admitted ticket; return the tickets that are admitted by this.

        Raises:
            ValueError: It does not hold that many.
        """
        if ticket.state is not TicketState.ADMITTED or not 1 <= places <= ticket.places:
            raise ValueError(f"{places} places given back by {ticket}")
        ticket.places -= places
        if ticket.places == 0:
            ticket.state = TicketState.GONE
        self.active -= places
        self._hold_time.left(places, ticket.admitted_at_s, now_s)
        return self._admit(now_s)

    def cancel(self, ticket: Ticket, now_s: float) -> list[Ticket]:
        """Remove a ticket, waiting or admitted; return the tickets that are admitted by this. A second call does nothing."""
        match ticket.state:
            case TicketState.WAITING:
                self._remove(ticket)
                return self._admit(now_s)  # others may have waited for it
            case TicketState.ADMITTED:
                return self.leave(ticket, ticket.places, now_s)
            case TicketState.GONE:
                return []

    def retry_after_s(self, now_s: float) -> float:
        """When the places waited for, and one more, will be free: their number over the rate at which places become free.

        With all places held, this rate is `max_active` over the mean time for which one is held.
        """
        return (self.waiting + 1) * self._hold_time.mean_s(now_s) / self.max_active

    def _take(self, ticket: Ticket, now_s: float) -> None:
        """Give a ticket its places."""
        ticket.state, ticket.admitted_at_s = TicketState.ADMITTED, now_s
        self._hold_time.taken(ticket.places, now_s)
        self.active += ticket.places

    def _admit(self, now_s: float) -> list[Ticket]:
        if not self._heap:
            return []
        admitted: list[Ticket] = []
        while self._heap:
            first = self._heap[0]
            if first.state is TicketState.WAITING:
                if self.active + first.places > self.max_active:
                    break
                self._take(first, now_s)
                self.waiting -= first.places
                self._waiting_tickets -= 1
                admitted.append(first)
            heapq.heappop(self._heap)
        self._compact()
        return admitted

    def _remove(self, ticket: Ticket) -> None:
        ticket.state = TicketState.GONE
        self.waiting -= ticket.places
        self._waiting_tickets -= 1
        self._compact()

    def _compact(self) -> None:
        """Remove the tickets that are gone when they are more than half of the heap: O(1) on average."""
        if len(self._heap) > 2 * self._waiting_tickets:
            self._heap = [t for t in self._heap if t.state is TicketState.WAITING]
            heapq.heapify(self._heap)
