"""Whether two answers agree. No I/O."""

import math
import re
from typing import Literal

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
