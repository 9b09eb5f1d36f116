"""How long a reply will be at most, at a high quantile, from the replies that have ended lately. No I/O."""

import bisect
from collections import deque

from services.domain.errors import invalid

DEFAULT_QUANTILE = 0.9
"""One admitted request in ten may need more KV than was kept for it: best effort gives way first, and most of it is idle."""
WINDOW_REPLIES = 512
MIN_REPLIES = 20  # fewer have no quantile worth the name: until then the longest possible reply counts


class ReplyLengths:
    """The quantile of the lengths of the latest replies, in tokens."""

    def __init__(self, quantile: float = DEFAULT_QUANTILE) -> None:
        if not 0 < quantile <= 1:
            raise invalid("reply_quantile", f"must be over 0 and at most 1, not {quantile}")
        self._quantile = quantile
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, tokens: int) -> None:
        """A reply has ended with so many tokens."""
        self._latest.append(tokens)
        bisect.insort(self._sorted, tokens)
        if len(self._latest) > WINDOW_REPLIES:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]

    def predict(self, produced: int, most: int) -> int:
        """The length of a reply that has `produced` tokens and may have `most`: the quantile of those longer than it is."""
        longer = self._sorted[bisect.bisect_right(self._sorted, produced) :]
        if len(longer) < MIN_REPLIES:
            return most
        return min(most, longer[min(len(longer) - 1, int(self._quantile * len(longer)))])
