"""A logistic model over the raw scores of several scorers, for each tier: fitting, cross-validation and its file.

P(good) = 1 / (1 + exp(-(w . z + b))), where z are raw scores less their mean, divided by their deviation. w has a Gaussian
prior (an L2 penalty), without which separable samples would have infinite weights. The only I/O is reading and writing the
file.
"""

import json
import math
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from penstock.judge_service.calibration.isotonic import MIN_SAMPLES, CalibrationError
from penstock.judge_service.calibration.metrics import brier, folds
from penstock.services.domain.auc import auc
from penstock.services.field_problems import from_json

PENALTY = 1.0  # variance of the prior of standardized weights
ITERATIONS = 50
TOLERANCE = 1e-9
ALL_TIERS = ""
MAX_LOGIT = 80.0


@dataclass(frozen=True, slots=True)
class LogisticModel:
    """One tier's model. mean, scale, weights: one number per scorer. auc, brier: cross-validated on `samples` answers."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    intercept: float
    samples: int
    auc: float
    brier: float

    def logit(self, raws: Seq[float]) -> float:
        """The logit of a good answer's probability. raws: one raw score per scorer."""
        parts = zip(raws, self.mean, self.scale, self.weights, strict=True)
        total = self.intercept + sum(weight * (raw - mean) / scale for raw, mean, scale, weight in parts)
        return max(-MAX_LOGIT, min(MAX_LOGIT, total))


@dataclass(frozen=True, slots=True)
class Combination:
    """scorers: names, in the order of the weights. models: by tier; ALL_TIERS for tiers without a model of their own."""

    scorers: tuple[str, ...]
    models: Mapping[str, LogisticModel]

    def logit(self, tier: str, raws: Seq[float]) -> float:
        return self.models.get(tier, self.models[ALL_TIERS]).logit(raws)

    @property
    def summary(self) -> str:
        """The quality of its models, each in a line."""
        return "".join(
            f"\n{'all tiers' if tier == ALL_TIERS else tier}: {model.samples} samples, AUC {model.auc:.3f}, "
            f"Brier score {model.brier:.3f} cross-validated"
            for tier, model in self.models.items()
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Combination":
        """Read a combination file.

        Raises:
            CalibrationError: It is not a combination file.
        """
        try:
            combination = from_json(cls, path.read_bytes())
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{path}: {error}") from error
        size, models = len(combination.scorers), combination.models
        if ALL_TIERS not in models or not size:
            raise CalibrationError(f"{path}: scorers and a model of all tiers (the key '') are needed")
        for tier, model in models.items():
            if not len(model.mean) == len(model.scale) == len(model.weights) == size or min(model.scale) <= 0:
                raise CalibrationError(f"{path}: models['{tier}']: needs {size} means, scales above 0 and weights")
        return combination


STATED_INTERCEPT = 1.0
"""With the stated weights of scorers: examples that pass or fail decide; without any, only an answer of whose tokens the
model is sure to 98 % scores 70. A first estimate, from one model's answers to programming tasks (`benchmarks real_models`).
"""


def stated_combination(scorers: Seq[str], weights: Seq[tuple[float, float]]) -> Combination:
    """A combination that is not fitted. weights: (weight, mean of the raw score) of each scorer."""
    by_scorer, means = zip(*weights, strict=True)
    model = LogisticModel(means, (1.0,) * len(weights), by_scorer, STATED_INTERCEPT, 0, 0.5, 0.25)
    return Combination(tuple(scorers), {ALL_TIERS: model})


def probability(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))


def fit_combination(
    scorers: Seq[str], raws: Seq[Seq[float]], good: Seq[bool], tiers: Seq[str], groups: Seq[Hashable]
) -> Combination:
    """Fit a model for all answers, and one for each tier that has enough of them, good and bad ones.

    raws: one raw score per scorer for each answer. groups: answers of one group are never both fitted to and measured on.

    Raises:
        CalibrationError: There are too few samples, or all have the same label.
    """
    x, y = np.asarray(raws, float).reshape(len(good), len(scorers)), np.asarray(good, bool)
    names, kinds = np.asarray(tiers, object), [*groups]
    models: dict[str, LogisticModel] = {}
    for tier in (ALL_TIERS, *sorted(set(tiers) - {ALL_TIERS})):
        rows = np.flatnonzero((names == tier) | (tier == ALL_TIERS))
        enough = len(rows) >= MIN_SAMPLES and bool(y[rows].any()) and not bool(y[rows].all())
        if not enough and tier == ALL_TIERS:
            raise CalibrationError(f"at least {MIN_SAMPLES} samples are needed, good and bad ones, not {len(rows)}")
        if enough:
            models[tier] = _validated(x[rows], y[rows], [kinds[row] for row in rows])
    return Combination(tuple(scorers), models)


def held_out_logits(x: np.ndarray, y: np.ndarray, groups: Seq[Hashable]) -> np.ndarray:
    """The logit of each sample under a model fitted to the other folds. x: (samples, scorers); y: (samples,) of bool."""
    fold, logits = folds(groups), np.zeros(len(y))
    for number in np.unique(fold):
        model = fitted(x[fold != number], y[fold != number])
        logits[fold == number] = [model.logit(row) for row in x[fold == number]]
    return logits


def _validated(x: np.ndarray, y: np.ndarray, groups: Seq[Hashable]) -> LogisticModel:
    logits = held_out_logits(x, y, groups)
    scores = [100.0 * probability(logit) for logit in logits]
    model = fitted(x, y)
    measured = auc(logits.tolist(), y.tolist()), brier(scores, y.tolist())
    return LogisticModel(model.mean, model.scale, model.weights, model.intercept, len(y), *measured)


def fitted(x: np.ndarray, y: np.ndarray) -> LogisticModel:
    """Newton's method on the penalized likelihood, which is concave; the intercept has no penalty."""
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    z = np.column_stack([np.ones(len(x)), (x - mean) / scale])
    penalty = np.eye(z.shape[1]) / PENALTY
    penalty[0, 0] = TOLERANCE  # keeps the matrix regular where all labels of a fold are equal
    weights = np.zeros(z.shape[1])
    for _ in range(ITERATIONS):
        p = 1.0 / (1.0 + np.exp(-np.clip(z @ weights, -MAX_LOGIT, MAX_LOGIT)))
        gradient = z.T @ (y - p) - penalty @ weights
        step = np.linalg.solve(z.T @ (z * (p * (1 - p))[:, None]) + penalty, gradient)
        weights = weights + step
        if float(np.abs(step).max()) < TOLERANCE:
            break
    return LogisticModel(
        tuple(map(float, mean)),
        tuple(map(float, scale)),
        tuple(map(float, weights[1:])),
        float(weights[0]),
        len(y),
        0.5,
        0.25,
    )
