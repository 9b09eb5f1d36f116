"""Compares an answer with the expected one: 100 or 0. No I/O."""

import math
import re
from collections.abc import Sequence as Seq
from typing import Literal

from judge_service.scorers.interface import JudgedAnswer, RawScore, ScorerKind
from services.domain.errors import invalid

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")


def final_answer(text: str) -> str:
    """What follows the last `Answer:`, else the whole text; stripped."""
    return text.rsplit("Answer:", 1)[-1].strip()


def last_number(text: str) -> float | None:
    """The last number in a text, thousands commas allowed; None if there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


class ExactScorer:
    """compare: the whole text, the last number, or the final answer (after the last `Answer:`)."""

    kind = ScorerKind.EXACT
    needs_logprobs = False
    needs_reference = True

    def __init__(self, compare: Literal["text", "number", "final-answer"]) -> None:
        self._compare = compare

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def score(self, answers: Seq[JudgedAnswer]) -> list[RawScore]:
        found = []
        for i, item in enumerate(answers):
            if item.reference is None:
                raise invalid(f"items[{i}].reference", "this scorer needs the expected answer")
            right = self._equal(item.answer, item.reference)
            found.append(RawScore(float(right), 100.0 * right))
        return found

    def _equal(self, answer: str, reference: str) -> bool:
        match self._compare:
            case "text":
                return answer.strip() == reference.strip()
            case "final-answer":
                return final_answer(answer) == final_answer(reference)
            case "number":
                said, wanted = last_number(answer), last_number(reference)
                return said is not None and wanted is not None and math.isclose(said, wanted, rel_tol=1e-9)
