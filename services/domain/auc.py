"""How well scores tell good answers from bad ones, without numpy: commands need it that run with the SDK alone. No I/O."""

import bisect
from collections.abc import Sequence


def auc(scores: Sequence[float], good: Sequence[bool]) -> float:
    """The probability that a good answer has a higher score than a bad one, ties counted half (Mann and Whitney).

    0.5 if all answers have the same label.
    """
    of_good = [score for score, is_good in zip(scores, good, strict=True) if is_good]
    of_bad = sorted(score for score, is_good in zip(scores, good, strict=True) if not is_good)
    if not of_good or not of_bad:
        return 0.5
    halves = sum(bisect.bisect_left(of_bad, score) + bisect.bisect_right(of_bad, score) for score in of_good)
    return halves / (2 * len(of_good) * len(of_bad))
