"""Predicts, from a prompt alone, the score that the judge will give each tier's answer. No I/O.

A logistic model over hashed features of the prompt's text: words, pairs of words, and sizes (words, commas, digits, the
longest number), each alone and together with the words that the prompt begins with. It is trained by
`planner_service.question.score_predictor`, and evaluated here with the standard library alone, because routers have no numpy.
"""

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.types.prompts import ChatPrompt, Prompt, TextPrompt

FORMAT = "penstock-score-predictor-1"
MAX_BUCKETS = 2**20
MAX_WORDS = 150
"""Of a prompt, so many words at its beginning and at its end are read: a prediction takes under a millisecond."""
MAX_READ_CHARACTERS = 2_000
STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096)
OPENING_WORDS = 3
_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")


class PredictorError(ValueError):
    """A file is no score predictor; the message names the field."""


def prompt_text(prompt: Prompt) -> str | None:
    """The text that scores are predicted from: the last message of a chat; None for token ids."""
    match prompt:
        case ChatPrompt(messages):
            return messages[-1].content if messages else ""
        case TextPrompt(text):
            return text
    return None


def features(text: str, buckets: int) -> list[int]:
    """The features of a text: distinct numbers from 0 to buckets - 1, ascending."""
    return sorted({zlib.crc32(name.encode("utf-8", "replace")) % buckets for name in _names(text)})


def _names(text: str) -> Iterator[str]:
    half = MAX_READ_CHARACTERS // 2
    read = text if len(text) <= MAX_READ_CHARACTERS else f"{text[:half]} {text[-half:]}"
    words = _WORD.findall(read.lower())
    if len(words) > 2 * MAX_WORDS:
        words = words[:MAX_WORDS] + words[-MAX_WORDS:]
    numbers = [part for part in words if part.isdigit()]
    shapes = ["0" * min(len(part), 6) if part.isdigit() else part for part in words]
    opening = " ".join(shapes[:OPENING_WORDS])
    yield f"o {opening}"
    for shape in shapes:
        yield f"1 {shape}"
    for one, other in pairwise(shapes):
        yield f"2 {one} {other}"
    sizes = {
        "words": len(words),
        "characters": len(text) // 8,
        "commas": words.count(","),
        "numbers": len(numbers),
        "longest number": max(map(len, numbers), default=0),
        "longest word": max(map(len, words), default=0),
    }
    for name, size in sizes.items():
        for step in STEPS:
            if size < step:
                break
            yield f"s {name} {step}"
            yield f"c {opening} {name} {step}"


@dataclass(frozen=True, slots=True)
class ScorePredictor:
    """tiers: that have predictions. weights: by feature, one for each tier. intercepts: one for each tier.

    samples: prompts that it was trained on. auc: by tier, the probability that of two prompts it predicts the higher score
    for the one that has it, on prompts that it was not trained on.
    """

    tiers: tuple[str, ...]
    buckets: int
    intercepts: tuple[float, ...]
    weights: Mapping[int, tuple[float, ...]]
    samples: int
    auc: tuple[float, ...]

    def predict(self, text: str) -> dict[str, float]:
        """The score, 0 to 100, that the answer of each tier is expected to get."""
        logits = list(self.intercepts)
        for feature in features(text, self.buckets):
            row = self.weights.get(feature)
            if row is not None:
                for tier, weight in enumerate(row):
                    logits[tier] += weight
        return {tier: expected_score(logit) for tier, logit in zip(self.tiers, logits, strict=True)}

    def to_json(self) -> str:
        """One line per feature, so that files can be compared."""
        head = {
            "format": FORMAT,
            "tiers": self.tiers,
            "buckets": self.buckets,
            "samples": self.samples,
            "auc": self.auc,
            "intercepts": self.intercepts,
        }
        lines = [f'  "{feature}": {json.dumps(row)}' for feature, row in sorted(self.weights.items())]
        body = ",\n".join(lines)
        return f'{json.dumps(head)[:-1]}, "weights": {{\n{body}\n}}}}\n'

    @classmethod
    def from_json(cls, text: str) -> "ScorePredictor":
        """Read what `to_json` wrote.

        Raises:
            PredictorError: It is something else.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PredictorError(f"not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PredictorError(f"format: must be {FORMAT}")
        tiers = data.get("tiers")
        if not isinstance(tiers, list) or not tiers or not all(isinstance(t, str) for t in tiers):
            raise PredictorError("tiers: must be a list of names")
        if len(set(tiers)) < len(tiers):
            raise PredictorError("tiers: a name occurs twice")
        buckets, weights = data.get("buckets"), data.get("weights")
        if not isinstance(buckets, int) or isinstance(buckets, bool) or not 1 <= buckets <= MAX_BUCKETS:
            raise PredictorError(f"buckets: must be a whole number from 1 to {MAX_BUCKETS}")
        if not isinstance(weights, dict):
            raise PredictorError("weights: must be an object")
        rows = {}
        for key, row in weights.items():
            if not key.isdecimal() or int(key) >= buckets:
                raise PredictorError(f"weights: '{key}' is no feature from 0 to {buckets - 1}")
            rows[int(key)] = _numbers(row, len(tiers), f"weights.{key}")
        samples = data.get("samples")
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
            raise PredictorError("samples: must be a whole number of at least 0")
        intercepts = _numbers(data.get("intercepts"), len(tiers), "intercepts")
        return cls(tuple(tiers), buckets, intercepts, rows, samples, _numbers(data.get("auc"), len(tiers), "auc"))


def expected_score(logit: float) -> float:
    """The score, 0 to 100, of a logit: the logistic function."""
    return 50.0 + 50.0 * math.tanh(logit / 2)


def _numbers(row: Any, count: int, field: str) -> tuple[float, ...]:
    if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != count:
        raise PredictorError(f"{field}: must be {count} numbers, one for each tier")
    for value in row:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise PredictorError(f"{field}: must be finite numbers")
    return tuple(map(float, row))
