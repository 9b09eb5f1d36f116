"""Detects that an instance is the overloaded outlier of its stage, and selects a request to move (CascadeInfer, section 4.4).

No I/O. Demand is memory: the tokens of all running and queued requests.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

OVERLOAD_MARGIN = 0.25  # demand above the stage's average, relative to it


def excess_tokens(own_tokens: float, peers_tokens: Seq[float]) -> float:
    """Demand of this instance above its stage's average; 0 if it is not overloaded.

    own_tokens: demand of this instance without requests already offered to others. peers_tokens: of the other instances.
    """
    if not peers_tokens:
        return 0.0
    average = (own_tokens + sum(peers_tokens)) / (1 + len(peers_tokens))
    return own_tokens - average if own_tokens > (1 + OVERLOAD_MARGIN) * average else 0.0


def to_hand_over(running: Mapping[str, int], excess: float) -> str | None:
    """The longest request whose move does not take this instance below the average; None if there is none.

    running: tokens by request id, of requests that may move. Only one at a time: the next check sees the effect.
    """
    fitting = [(tokens, request_id) for request_id, tokens in running.items() if 0 < tokens <= excess]
    return max(fitting)[1] if fitting else None
