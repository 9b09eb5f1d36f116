"""Which of a request's answers is delivered where the plan delivers the best one. No I/O."""

from collections.abc import Sequence


def best_of(scores: Sequence[float | None]) -> int:
    """Index of the answer to deliver: that with the highest score; of equal scores the latest.

    scores: of a request's finished answers, in order, at least one; None: it could not be scored. An earlier answer without a
    score is never delivered. The last answer is delivered if it has none itself: it cannot be compared.
    """
    best = len(scores) - 1
    highest = scores[best]
    if highest is None:
        return best
    for i in range(best - 1, -1, -1):
        score = scores[i]
        if score is not None and score > highest:
            best, highest = i, score
    return best
