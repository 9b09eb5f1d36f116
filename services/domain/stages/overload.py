"""When an instance is the overloaded outlier of its stage, and what it should hand over (CascadeInfer, section 4.4).

No I/O. Demand is memory: the tokens of all requests running and queued.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

OVERLOAD_MARGIN = 0.25  # demand over the stage's average, as a share of it


def excess_tokens(own_tokens: float, peers_tokens: Seq[float], margin: float = OVERLOAD_MARGIN) -> float:
    """How far this instance is over its stage's average; 0 unless it is overloaded.

    own_tokens: this instance's demand, without what it has already offered to others. peers_tokens: the other instances'.
    """
    if not peers_tokens:
        return 0.0
    average = (own_tokens + sum(peers_tokens)) / (1 + len(peers_tokens))
    return own_tokens - average if own_tokens > (1 + margin) * average else 0.0


def to_hand_over(running: Mapping[str, int], excess: float) -> str | None:
    """The longest running request that does not take this instance below the average; None if there is none.

    running: tokens by request id, of requests that may move. One at a time: the next look sees what it changed.
    """
    fitting = [(tokens, request_id) for request_id, tokens in running.items() if 0 < tokens <= excess]
    return max(fitting)[1] if fitting else None
