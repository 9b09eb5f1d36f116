"""How many proposed tokens are worth verifying. No I/O.

A pass computes one row for each token: cost = fixed + rows * row. Of a pass over a batch, one reply pays an equal share of
the fixed part, and its own rows. So with one row as usual and `w` proposed ones, its cost is 1 + price * w in units of what a
token costs it without proposals, and it yields 1 + a1 + a1 a2 + ... tokens, where `ai` is the probability that the i-th
proposed token is accepted if those before it are. (SpecRouter's equation 7 prices a verification as `w` single steps, which
is too much.)
"""

from collections.abc import Iterable

FIRST_SHARE = 0.15
"""Before passes were measured: those over 8 rows of the shipped medium and large model take 2.0 to 2.2 times as long as one
over a single row. Of 4-bit weights on a CPU it is three times as much."""
FEWEST_PASSES = 6
LAST_PASSES = 100.0
"""That count; an older one by as much less as passes came after it."""


class RowShare:
    """What one more row costs, as a share of a pass with one row: by least squares over the last passes of decodes."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5

    def add(self, rows: int, seconds: float) -> None:
        """Count a pass."""
        old, new = 1 - 1 / LAST_PASSES, (1, rows, seconds, rows * rows, rows * seconds)
        self._sums = [old * total + each for total, each in zip(self._sums, new, strict=True)]

    @property
    def value(self) -> float:
        """From 0 to 1; FIRST_SHARE before passes over different numbers of rows were counted."""
        count, rows, seconds, rows_squared, product = self._sums
        spread = count * rows_squared - rows**2
        if count < FEWEST_PASSES or spread <= 1e-6 * rows**2:
            return FIRST_SHARE
        row_s = (count * product - rows * seconds) / spread
        one_s = (seconds - row_s * (rows - count)) / count
        return min(1.0, max(0.0, row_s / one_s)) if one_s > 0 else 1.0


def row_price(replies: int, row_share: float) -> float:
    """What one more row costs a reply, in units of what a token costs it, when so many replies share each pass; at most 1."""
    return row_share * replies / (1 - row_share + row_share * replies)


def best_window(acceptance: Iterable[float], price: float) -> int:
    """The number of proposed tokens with the most tokens per cost; 0 if none is worth its row.

    acceptance: of each proposed token, the probability that it is accepted if those before it are. As the probability that
    all are accepted only falls, the first token that lowers the ratio ends the window.
    """
    window, tokens, cost, all_accepted = 0, 1.0, 1.0, 1.0
    for probability in acceptance:
        all_accepted *= probability
        if (tokens + all_accepted) * cost <= tokens * (cost + price):
            break
        window, tokens, cost = window + 1, tokens + all_accepted, cost + price
    return window
