"""A logistic model over the raw scores of several scorers, for each tier: fitting, cross-validation and its file.

P(good) = 1 / (1 + exp(-(w . z + b))), where z are raw scores less their mean, divided by their deviation. w has a Gaussian
prior (an L2 penalty), without which separable samples would have infinite weights. No I/O but that of `Fitted`.
"""

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from penstock.judge_service.calibration.fitted import Fitted, suffice, too_few
from penstock.judge_service.calibration.metrics import brier, folds
from penstock.judge_service.scoring.interface import MAX_LOGIT, probability
from penstock.services.domain.auc import auc

PENALTY = 1.0  # variance of the prior of standardized weights
ITERATIONS = 50
TOLERANCE = 1e-9
ALL_TIERS = ""


@dataclass(frozen=True, slots=True)
class LogisticModel:
    """One tier's model. mean, scale, weights: one number per scorer. auc, brier: cross-validated on `samples` answers; those
    of a model that tells nothing if it is not validated."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    intercept: float
    samples: int
    auc: float = 0.5
    brier: float = 0.25

    def logit(self, raws: Seq[float]) -> float:
        """The logit of a good answer's probability. raws: one raw score per scorer."""
        parts = zip(raws, self.mean, self.scale, self.weights, strict=True)
        total = self.intercept + sum(weight * (raw - mean) / scale for raw, mean, scale, weight in parts)
        return max(-MAX_LOGIT, min(MAX_LOGIT, total))


@dataclass(frozen=True, slots=True)
class Combination(Fitted):
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

    def problem(self) -> str:
        size = len(self.scorers)
        if ALL_TIERS not in self.models or not size:
            return "scorers and a model of all tiers (the key '') are needed"
        for tier, model in self.models.items():
            if not len(model.mean) == len(model.scale) == len(model.weights) == size or min(model.scale) <= 0:
                return f"models['{tier}']: needs {size} means, scales above 0 and weights"
        return ""


STATED_INTERCEPT = 1.0
"""With the stated weights of scorers: examples that pass or fail decide; without any, only an answer of whose tokens the
model is sure to 98 % scores 70. A first estimate, from one model's answers to programming tasks (`benchmarks real_models`).
"""


def stated_combination(scorers: Seq[str], weights: Seq[tuple[float, float]]) -> Combination:
    """A combination that is not fitted. weights: (weight, mean of the raw score) of each scorer."""
    by_scorer, means = zip(*weights, strict=True)
    model = LogisticModel(means, (1.0,) * len(weights), by_scorer, STATED_INTERCEPT, 0)
    return Combination(tuple(scorers), {ALL_TIERS: model})


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
        if suffice(y[rows].tolist()):
            models[tier] = _validated(x[rows], y[rows], [kinds[row] for row in rows])
        elif tier == ALL_TIERS:
            raise too_few(len(rows))
    return Combination(tuple(scorers), models)


def held_out_logits(x: np.ndarray, y: np.ndarray, groups: Seq[Hashable]) -> np.ndarray:
    """The logit of each sample under a model fitted to the other folds. x: (samples, scorers); y: (samples,) of bool."""
    fold, logits = folds(groups), np.zeros(len(y))
    for number in np.unique(fold):
        model = fitted(x[fold != number], y[fold != number])
        logits[fold == number] = [model.logit(row) for row in x[fold == number]]
    return logits


def _validated(x: np.ndarray, y: np.ndarray, groups: Seq[Hashable]) -> LogisticModel:
    logits, good = held_out_logits(x, y, groups).tolist(), y.tolist()
    scores = [100.0 * probability(logit) for logit in logits]
    return replace(fitted(x, y), auc=auc(logits, good), brier=brier(scores, good))


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
    intercept, *by_scorer = weights.tolist()
    return LogisticModel(tuple(mean.tolist()), tuple(scale.tolist()), tuple(by_scorer), intercept, len(y))
