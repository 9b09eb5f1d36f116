"""Whether a move saves more time than it takes. No I/O.

A move of a request takes its KV over the bandwidth. It saves, for each output token that the request still generates, what
the batches of both instances cost less (equation 1 of CascadeInfer: request-seconds per output token, over all requests of a
batch). How many tokens are still to come is not known: as many as there are, the median for lengths without a scale. This
weighs the same time against the same quality as the partition does (`planner_service.stages.partition`), for one request and
for the batches that there are.
"""

from collections.abc import Sequence

from penstock.services.domain.stages.qoe import BatchLoad, InFlight, batch_quality
from penstock.types.plans import QoeModel

ROUND_TRIP_S = 0.001
"""Of the messages of a move without KV."""


def move_s(tokens: int, kv_bytes_per_token: float, bytes_per_s: float) -> float:
    """Seconds that a move of a request of this length takes.

    bytes_per_s: 0 only without KV.
    """
    sending_s = tokens * kv_bytes_per_token / bytes_per_s if bytes_per_s > 0 else 0.0
    return sending_s + ROUND_TRIP_S


def saved_s(request: InFlight, here: BatchLoad, there: Sequence[BatchLoad], qoe: QoeModel) -> float:
    """Request-seconds that a move from `here` to an average one of `there` saves, over what the request still generates.

    here: with the request. Negative if it costs more than it saves; 0 without a target.
    """
    if not there:
        return 0.0
    own = BatchLoad.of([request])
    target = BatchLoad(*(sum(values) / len(there) for values in zip(*there, strict=True)))
    left = BatchLoad(*(max(0.0, a - b) for a, b in zip(here, own, strict=True)))
    joined = BatchLoad(*(a + b for a, b in zip(target, own, strict=True)))
    gained = (
        batch_quality(qoe, here) + batch_quality(qoe, target) - batch_quality(qoe, left) - batch_quality(qoe, joined)
    )
    return max(1, request.tokens - request.input_tokens) * gained


def worth_moving(request: InFlight, here: BatchLoad, there: Sequence[BatchLoad], qoe: QoeModel, takes_s: float) -> bool:
    """Whether a move that takes so long saves more."""
    return saved_s(request, here, there, qoe) > takes_s
