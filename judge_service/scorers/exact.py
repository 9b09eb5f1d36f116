"""Compares an answer with the expected one: 100 or 0. No I/O."""

import math
import re
from collections.abc import Sequence as Seq
from typing import Literal

from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from services.domain.errors import invalid

Compare = Literal["text", "number", "final-answer"]
EQUAL_NUMBERS = 1e-9
"""Relative difference up to which numbers are equal, unless a scorer has a tolerance: rounding of binary fractions."""
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")


def final_answer(text: str) -> str:
    """The text after the last `Answer:`, or all of it without one; stripped."""
    return text.rsplit("Answer:", 1)[-1].strip()


def last_number(text: str) -> float | None:
    """The last number in a text, possibly with thousands separators; None if there is none."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def same(compare: Compare, answer: str, reference: str, tolerance: float = EQUAL_NUMBERS) -> bool:
    """Whether two answers agree. tolerance: largest relative difference of numbers."""
    match compare:
        case "text":
            return answer.strip() == reference.strip()
        case "final-answer":
            return final_answer(answer) == final_answer(reference)
        case "number":
            number, expected = last_number(answer), last_number(reference)
            return number is not None and expected is not None and math.isclose(number, expected, rel_tol=tolerance)


class ExactScorer:
    """Compares with the expected answer. compare: the text, the last number, or the text after the last `Answer:`."""

    kind = ScorerKind.EXACT
    needs_logprobs = False
    needs_reference = True
    scores_unfinished = False

    def __init__(self, compare: Compare, tolerance: float = EQUAL_NUMBERS) -> None:
        """tolerance: largest relative difference of numbers."""
        self._compare, self._tolerance = compare, tolerance

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        scores = []
        for i, item in enumerate(answers):
            if item.reference is None:
                raise invalid(f"items[{i}].reference", "this scorer needs the expected answer")
            is_same = same(self._compare, item.answer, item.reference, self._tolerance)
            scores.append(RawScore(float(is_same), 100.0 * is_same))
        return scores
