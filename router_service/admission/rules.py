"""Who may be worked on, who waits and who is refused. No I/O, no clock: the caller says what time it is.

A request needs one place, or several at once (the choices of one HTTP request). Order: priority, then arrival. Nobody
overtakes the first in the queue, so one who needs many places gets them in the end; nobody holds places while waiting.
"""

import enum
import heapq
from collections import deque
from dataclasses import dataclass, field

GUESSED_HOLD_S = 1.0  # how long a place is held, as long as nothing is known
MIN_WINDOW = 64  # places left that the mean time looks back on, at least


class TicketState(enum.Enum):
    WAITING = "waiting"
    ADMITTED = "admitted"
    GONE = "gone"
    """Refused, cancelled or left."""


@dataclass(slots=True, order=True)
class Ticket:
    """One request at the queue; ordered by whose turn it is."""

    rank: tuple[int, int]
    places: int = field(compare=False)
    state: TicketState = field(default=TicketState.WAITING, compare=False)
    admitted_at_s: float = field(default=0.0, compare=False)


class HoldTime:
    """How long a place is held: the mean over the last places left, so idle times do not count.

    Where the places still held are older than that, their mean age: when nothing leaves any more the time grows.
    """

    def __init__(self, max_active: int) -> None:
        self._held_s: deque[float] = deque([GUESSED_HOLD_S] * max_active, maxlen=max(MIN_WINDOW, max_active))
        self._active, self._starts_s = 0, 0.0  # places held, and the sum of the times at which they were taken

    def taken(self, places: int, now_s: float) -> None:
        self._active += places
        self._starts_s += places * now_s

    def left(self, places: int, since_s: float, now_s: float) -> None:
        """So many places, taken at `since_s`, have been left."""
        self._active -= places
        self._starts_s -= places * since_s
        self._held_s.extend([now_s - since_s] * places)

    def mean_s(self, now_s: float) -> float:
        age_s = now_s - self._starts_s / self._active if self._active else 0.0
        return max(age_s, sum(self._held_s) / len(self._held_s))


class Admission:
    """At most `max_active` places are held and `max_waiting` waited for.

    Invariant: `active` and `waiting` are the sums of places of admitted and waiting tickets; the first waiting does not fit.
    """

    def __init__(self, max_active: int, max_waiting: int) -> None:
        self.max_active, self.max_waiting = max_active, max_waiting
        self.active = self.waiting = 0
        self._hold_time = HoldTime(max_active)
        self._heap: list[Ticket] = []  # with tickets that are gone, at most as many as are waiting
        self._waiting_tickets = 0
        self._arrivals = 0

    @property
    def is_full(self) -> bool:
        """Whether any request that comes now is refused, whatever its priority and the places it needs."""
        return self.active >= self.max_active and self.waiting >= self.max_waiting

    def enter(self, priority: int, places: int, now_s: float) -> tuple[Ticket, list[Ticket]]:
        """Add a request; return its ticket and all that are admitted by this (at most itself).

        ValueError if it needs more places than there are.
        """
        if not 1 <= places <= self.max_active:
            raise ValueError(f"{places} places of {self.max_active}")
        self._arrivals += 1
        ticket = Ticket((-priority, self._arrivals), places)
        heapq.heappush(self._heap, ticket)
        self.waiting += places
        self._waiting_tickets += 1
        admitted = self._admit(now_s)
        if ticket.state is TicketState.WAITING and self.waiting > self.max_waiting:
            self._remove(ticket)
        return ticket, admitted

    def leave(self, ticket: Ticket, places: int, now_s: float) -> list[Ticket]:
        """Give back some places of an admitted ticket; return the tickets that are admitted for it.

        ValueError if it does not hold so many.
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
        """Take a ticket out, waiting or admitted; return the tickets that are admitted for it. Twice does nothing more."""
        match ticket.state:
            case TicketState.WAITING:
                self._remove(ticket)
                return self._admit(now_s)  # it may have been the one that others waited behind
            case TicketState.ADMITTED:
                return self.leave(ticket, ticket.places, now_s)
            case TicketState.GONE:
                return []

    def retry_after_s(self, now_s: float) -> float:
        """When the places waited for, and one more, will have become free: their number over the rate.

        The rate at which places are left, all of them held, is `max_active` over the mean time for which one is held.
        """
        return (self.waiting + 1) * self._hold_time.mean_s(now_s) / self.max_active

    def _admit(self, now_s: float) -> list[Ticket]:
        admitted: list[Ticket] = []
        while self._heap:
            first = self._heap[0]
            if first.state is TicketState.WAITING:
                if self.active + first.places > self.max_active:
                    break
                first.state, first.admitted_at_s = TicketState.ADMITTED, now_s
                self._hold_time.taken(first.places, now_s)
                self.active += first.places
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
        """Forget the tickets that are gone once they are more than half: O(1) on average, and no memory stays."""
        if len(self._heap) > 2 * self._waiting_tickets:
            self._heap = [t for t in self._heap if t.state is TicketState.WAITING]
            heapq.heapify(self._heap)
