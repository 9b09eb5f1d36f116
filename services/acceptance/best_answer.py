"""The best answer: which of a request's answers is delivered. No I/O."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.services.acceptance.rule import AcceptanceRule
from penstock.types.rules import RuleOptions

if TYPE_CHECKING:
    from penstock.services.acceptance.arrays import Bools, Floats, Ints
    from penstock.services.acceptance.judged import JudgedSample


class BestAnswer(AcceptanceRule):
    """The answer with the highest score is delivered, instead of always the last one."""

    field = "best_answer"
    option = "best_answer"
    question = "best_answer: false  # whether the best of a request's answers is delivered"

    def under(self, answers: "JudgedSample", value: bool) -> "JudgedSample":
        return replace(answers, highest_delivered=True) if value else answers

    def choices(self, judged: "JudgedSample", tier: int) -> Sequence[bool]:
        return (True,)

    def in_mesh_file(self, value: bool) -> bool | None:
        return value or None

    def lines(self, plan: Any, question: RuleOptions | None) -> list[str]:
        text = "delivered: the answer with the highest score of those that a request has got"
        return [text] if plan.best_answer else []


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


def delivered(scores: "Floats", finished: "Bools", *, highest: bool) -> "Ints":
    """(N) the tier whose answer is the reply: the last one that a request has, or with `highest` as `best_of`.

    scores (C, N), finished (C, N): of its answers, and which there are.
    """
    import numpy as np

    ranked = np.where(finished, scores, -1.0) if highest else finished
    return np.asarray(len(scores) - 1 - ranked[::-1].argmax(axis=0), np.int64)
