"""How many proposed tokens are worth verifying. No I/O.

A pass computes one row for each token: cost = fixed + rows * row. Of a pass over a batch, one reply pays an equal share of
the fixed part, and its own rows. So with one row as usual and `w` proposed ones, its cost is 1 + price * w in units of what a
token costs it without proposals, and it yields 1 + a1 + a1 a2 + ... tokens, where `ai` is the probability that the i-th
proposed token is accepted if those before it are. (SpecRouter's equation 7 prices a verification as `w` single steps, which
is too much.)
"""

from collections.abc import Iterable

ROW_SHARE = 0.15
"""Cost of one more row, as a share of a pass with one row: passes over 8 rows of the shipped medium and large model take 2.0
to 2.2 times as long as one over a single row in the compiled pass."""


def row_price(replies: int, row_share: float = ROW_SHARE) -> float:
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
