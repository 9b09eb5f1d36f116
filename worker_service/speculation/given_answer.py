"""Proposes the tokens of a given answer: one that another model has given, or what a client predicts. No I/O.

The answer is not the reply, so the two must be aligned again wherever they differ. A pointer tells where the reply is in the
given answer. If the next token of the reply is not the one at the pointer, it is assumed to be in its place, and the
pointer moves to the next position. If that is wrong as well, the last tokens of the reply are looked up in the given
answer, and the pointer moves to the end of the longest match, of several the nearest one. Without a match the pointer
is lost: it continues position by position, and little or nothing is proposed, until a token is right or there is a match.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from penstock.worker_service.speculation.windows import best_window

SHORTEST_MATCH = 3
"""Tokens. Shorter matches are often misleading, longer ones come too late: docs/adr/0048."""
LONGEST_MATCH = 16
NEAREST_MATCHES = 8
"""Matches that are compared, and as many tokens of each: the work per token is bounded, whatever the given answer."""

LOST = -1
RUNS = (LOST, 0, 1, 4, 16)
"""Acceptance is estimated by how many tokens have been right in a row: at least this many; LOST: the pointer is lost."""
FIRST_SHARES = (0.25, 0.5, 0.75, 0.85, 0.95)
"""Shares accepted before any have been counted: about those of the shipped family."""
FIRST_COUNT, MAX_COUNT = 16.0, 4096.0
"""Weight of the first shares, in tokens. At the larger number, counts are halved, so that estimates follow changes."""


class RunAcceptance:
    """How often the token at the pointer is right, by the number of right ones in a row before it. Shared by all replies."""

    def __init__(self) -> None:
        self._counts = [FIRST_COUNT] * len(RUNS)
        self._right = [FIRST_COUNT * share for share in FIRST_SHARES]

    def after(self, run: int) -> float:
        """Probability that the next token is right after `run` right ones, or LOST."""
        at = bisect_right(RUNS, run) - 1
        return self._right[at] / self._counts[at]

    def add(self, run: int, *, right: bool) -> None:
        """Count a token."""
        at = bisect_right(RUNS, run) - 1
        self._counts[at] += 1
        self._right[at] += right
        if self._counts[at] >= MAX_COUNT:
            self._counts[at] /= 2
            self._right[at] /= 2


class GivenAnswer:
    """A DraftSource that proposes the tokens of a given answer."""

    def __init__(self, answer: Seq[int], acceptance: RunAcceptance, price: Callable[[], float] = lambda: 0.0) -> None:
        """price: of a row at this moment, as in `windows.row_price`. Takes milliseconds for the longest answers."""
        self._answer = tuple(answer)
        self._acceptance, self._price = acceptance, price
        self._ends_of: dict[tuple[int, ...], list[int]] = {}  # where each sequence of the shortest length ends
        for end in range(SHORTEST_MATCH, len(self._answer) + 1):
            self._ends_of.setdefault(self._answer[end - SHORTEST_MATCH : end], []).append(end)
        self._at = 0  # the pointer
        self._run = 0  # right tokens in a row, or LOST
        self._missed = 0  # wrong ones since the pointer was right
        self._proposed: Seq[int] = ()
        self._last: deque[int] = deque(maxlen=LONGEST_MATCH)  # of the reply

    def propose(self, tokens: Seq[int], limit: int) -> Seq[int]:
        """As many tokens from the pointer on as are worth their rows."""
        window = best_window(self._acceptances(min(limit, len(self._answer) - self._at)), self._price())
        self._proposed = self._answer[self._at : self._at + window]
        return self._proposed

    def observe(self, accepted: int, token: int) -> None:
        """The reply continues with the first `accepted` proposed tokens, and `token`."""
        for each in (*self._proposed[:accepted], token):
            self._advance(each, self._acceptance)
        self._proposed = ()

    def align(self, output: Seq[int]) -> None:
        """The reply has these tokens already: it is resumed."""
        for token in output:
            self._advance(token, None)

    def _acceptances(self, count: int) -> Iterator[float]:
        run = self._run
        for _ in range(count):
            yield self._acceptance.after(run)
            run = max(run, 0) + 1

    def _advance(self, token: int, acceptance: RunAcceptance | None) -> None:
        """The reply continues with `token`. acceptance: that counts it."""
        self._last.append(token)
        if self._at >= len(self._answer):  # what follows may still repeat a part of the answer
            self._realign()
            return
        right = self._answer[self._at] == token
        if acceptance is not None:
            acceptance.add(self._run, right=right)
        self._at += 1
        if right:
            self._run, self._missed = max(self._run, 0) + 1, 0
            return
        self._run, self._missed = 0, self._missed + 1
        if self._missed > 1:
            self._realign()

    def _realign(self) -> None:
        """Move the pointer to the end of the longest match of the reply's last tokens; without one, it is lost."""
        self._run = LOST
        last = tuple(self._last)
        ends = self._ends_of.get(last[-SHORTEST_MATCH:], ())
        if not ends:
            return
        first = max(0, bisect_left(ends, self._at) - NEAREST_MATCHES // 2)
        nearest = ends[first : first + NEAREST_MATCHES]
        self._at = min(nearest, key=lambda end: (-self._match(end, last), abs(end - self._at)))
        self._run = self._missed = 0

    def _match(self, end: int, last: tuple[int, ...]) -> int:
        """How many of the last tokens match the answer before `end`."""
        length = 0
        while length < min(end, len(last)) and self._answer[end - 1 - length] == last[-1 - length]:
            length += 1
        return length
