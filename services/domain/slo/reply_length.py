"""Predicts the length of a reply at a high quantile, from the replies that have ended recently. No I/O."""

from penstock.services.domain.slo.sliding_sample import SlidingSample

DEFAULT_QUANTILE = 0.9
"""One admitted request in ten may need more KV than was reserved for it: best effort gives way first, and most of what is
reserved is idle."""
WINDOW_REPLIES = 512
MIN_REPLIES = 20  # fewer have no meaningful quantile: until then the longest possible reply counts


class ReplyLengths:
    """The quantile of the lengths of the latest replies, in tokens."""

    def __init__(self, quantile: float = DEFAULT_QUANTILE) -> None:
        self._quantile, self._lengths = quantile, SlidingSample(WINDOW_REPLIES)

    def add(self, tokens: int) -> None:
        """Add the length of a reply that has ended."""
        self._lengths.add(tokens)

    def predict(self, produced: int, limit: int) -> int:
        """The length of a reply that has `produced` tokens and may have `limit`: the quantile of those longer than it is."""
        longer = self._lengths.above(produced)
        if len(longer) < MIN_REPLIES:
            return limit
        return min(limit, int(longer[min(len(longer) - 1, int(self._quantile * len(longer)))]))

    def predict_after(self, predicted: int, limit: int) -> int:
        """How many tokens more a reply is predicted to have that outlives its prediction; 0 where that is the limit."""
        return self.predict(predicted, limit) - predicted
