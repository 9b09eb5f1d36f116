"""How well scores tell good answers from bad ones, without numpy: commands need it that run with the SDK alone. No I/O."""

from collections.abc import Sequence


def auc(scores: Sequence[float], good: Sequence[bool]) -> float:
    """The probability that a good answer has a higher score than a bad one, ties counted half (Mann and Whitney).

    0.5 if all answers have the same label.
    """
    order = sorted(range(len(scores)), key=scores.__getitem__)
    rank_sum, at = 0.0, 0
    while at < len(order):
        end = at
        while end < len(order) and scores[order[end]] == scores[order[at]]:
            end += 1
        rank_sum += sum(good[i] for i in order[at:end]) * (at + end + 1) / 2  # the mean rank of ties, from 1
        at = end
    positive = sum(good)
    negative = len(good) - positive
    if not positive or not negative:
        return 0.5
    return float((rank_sum - positive * (positive + 1) / 2) / (positive * negative))
