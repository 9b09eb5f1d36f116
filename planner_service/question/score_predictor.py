"""Trains score predictors from prompts that every tier has answered and the judge has scored. No I/O.

Logistic regression with the scores as soft labels (score / 100), L2 penalty by cross-validation, then Platt scaling on the
logits of prompts that were held out (Platt 1999), so that a predicted score of 30 means 30 on average. Predictions of the
training prompts themselves are cross-fitted: a prompt's score is predicted by a model that has not seen the prompt.

Isotonic regression instead of Platt scaling, cross-fitted on three models' answers to 5,989 prompts of LLMRouterBench: the
calibration error falls from 2.3 to 3.5 points to 1.2 to 1.5, but squared error and log loss change by under 1 %. Of 500
prompts the error is the same and log loss up to 7 % worse. So the two numbers of Platt scaling stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

from penstock.planner_service.simulator.workload import Floats, Ints
from penstock.services.domain.auc import auc
from penstock.services.domain.errors import invalid
from penstock.services.domain.score_prediction import ScorePredictor, expected_score, features

BUCKETS = 2**14
FOLDS = 5
PENALTIES = (10.0, 3.0, 1.0, 0.3)  # descending: each fit begins where the one before it ended
LEAST_PROMPTS = 100
PARTS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """predicted (N, C): scores of the training prompts, cross-fitted. log_loss, constant_loss (C): of the cross-fitted
    predictions, and of the mean score as the prediction for every prompt. calibration_error (C): of the former, in points."""

    predictor: ScorePredictor
    predicted: Floats
    log_loss: tuple[float, ...]
    constant_loss: tuple[float, ...]
    calibration_error: tuple[float, ...]


def distinct_prompts(texts: Sequence[str]) -> Sequence[str]:
    """Each once, in their order.

    Raises:
        InvalidRequest: They are fewer than LEAST_PROMPTS.
    """
    distinct = [*dict.fromkeys(texts)]
    if len(distinct) < LEAST_PROMPTS:
        raise invalid("prompts", f"{len(distinct)} distinct prompts; training needs at least {LEAST_PROMPTS}")
    return distinct


def train(
    texts: Sequence[str], tiers: Sequence[str], scores: Floats, *, seed: int = 1, penalties: Sequence[float] = PENALTIES
) -> Trained:
    """Train on N prompts. scores (N, C), from 0 to 100: of each tier's answer. Equal texts are held out together.

    Raises:
        InvalidRequest: Fewer than LEAST_PROMPTS distinct prompts, or scores of another shape.
    """
    if scores.shape != (len(texts), len(tiers)):
        raise invalid("quality", f"{len(texts)} prompts, but scores of shape {scores.shape}")
    distinct = {text: i for i, text in enumerate(distinct_prompts(texts))}
    fold_of = np.random.default_rng(seed).permutation(len(distinct)) % FOLDS
    fold: Ints = fold_of[[distinct[text] for text in texts]].astype(np.int64)
    matrix, known = _matrix(texts)
    intercepts, columns, aucs, losses, constants = [], [], [], [], []
    predicted = np.zeros_like(scores, dtype=float)
    for tier in range(len(tiers)):
        labels: Floats = np.clip(scores[:, tier] / 100.0, 0.0, 1.0)
        logits, penalty = _held_out_logits(matrix, labels, fold, penalties)
        slope, shift = _platt(logits, labels)
        weights = _fit(matrix, labels, penalty)
        intercepts.append(float(slope * weights[-1] + shift))
        columns.append(np.round(slope * weights[:-1], 5))
        predicted[:, tier] = [expected_score(float(x)) for x in _cross_scaled(logits, labels, fold)]
        aucs.append(_auc(logits, labels))
        losses.append(_log_loss(predicted[:, tier] / 100.0, labels))
        constants.append(_log_loss(np.full(len(labels), labels.mean()), labels))
    table = np.stack(columns, axis=1)
    rows = {int(known[i]): tuple(map(float, table[i])) for i in np.flatnonzero(np.abs(table).max(axis=1) > 0)}
    predictor = ScorePredictor(tuple(tiers), BUCKETS, tuple(intercepts), rows, len(texts), tuple(aucs))
    errors = tuple(calibration_error(predicted[:, tier], scores[:, tier]) for tier in range(len(tiers)))
    return Trained(predictor, predicted, tuple(losses), tuple(constants), errors)


def calibration_error(predicted: Floats, scores: Floats) -> float:
    """Expected calibration error in points, over PARTS equal parts of N prompts by what is predicted."""
    parts = np.array_split(np.argsort(predicted, kind="stable"), PARTS)
    gaps = (len(part) * abs(predicted[part].mean() - scores[part].mean()) for part in parts if len(part))
    return float(sum(gaps) / len(scores))


def _matrix(texts: Sequence[str]) -> tuple[sparse.csr_matrix, Ints]:
    """((N, F + 1) of zeros and ones, (F) the features of its columns); the last column is that of the intercept."""
    rows = [[*features(text, BUCKETS), BUCKETS] for text in texts]
    known, columns = np.unique(np.array([i for row in rows for i in row]), return_inverse=True)
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    shape = (len(texts), len(known))
    return sparse.csr_matrix((np.ones(len(columns)), columns, starts), shape=shape), known[:-1].astype(np.int64)


def _held_out_logits(
    matrix: sparse.csr_matrix, labels: Floats, fold: Ints, penalties: Sequence[float]
) -> tuple[Floats, float]:
    """(logits of each prompt by the model of the other folds, the penalty with the least loss)."""
    fits = list[tuple[float, float, Floats]]()
    parts = [(np.flatnonzero(fold != number), np.flatnonzero(fold == number)) for number in range(FOLDS)]
    matrices = [(matrix[others], matrix[own]) for others, own in parts]
    begins: list[Floats | None] = [None] * FOLDS
    for penalty in penalties:
        logits = np.zeros(len(labels))
        for number, (others, own) in enumerate(parts):
            fitted = _fit(matrices[number][0], labels[others], penalty, begins[number])
            begins[number], logits[own] = fitted, matrices[number][1] @ fitted
        loss = float(np.mean(np.logaddexp(0.0, logits) - labels * logits))
        fits.append((loss, penalty, logits))
    _, penalty, logits = min(fits, key=lambda fit: fit[0])  # of equals the first
    return logits, penalty


def _fit(matrix: sparse.csr_matrix, labels: Floats, penalty: float, begin: Floats | None = None) -> Floats:
    """Weights with the least loss, the intercept last and not penalised."""
    transposed = matrix.T.tocsr()
    penalised = np.ones(matrix.shape[1])
    penalised[-1] = 0.0

    def loss(weights: Floats) -> tuple[float, Floats]:
        logits = matrix @ weights
        value = float(np.sum(np.logaddexp(0.0, logits) - labels * logits))
        value += 0.5 * penalty * float(np.sum(penalised * weights**2))
        share = 1.0 / (1.0 + np.exp(-np.clip(logits, -50, 50)))
        return value, transposed @ (share - labels) + penalty * penalised * weights

    start = np.zeros(matrix.shape[1]) if begin is None else begin
    optimum = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 100, "ftol": 1e-6})
    return np.asarray(optimum.x, float)


def _platt(logits: Floats, labels: Floats) -> tuple[float, float]:
    """(slope, at least 0, and shift) of the logits with the least loss."""

    def loss(values: Floats) -> float:
        z = values[0] * logits + values[1]
        return float(np.mean(np.logaddexp(0.0, z) - labels * z))

    optimum = optimize.minimize(loss, np.array([1.0, 0.0]), method="L-BFGS-B", bounds=[(0.0, 10.0), (-10.0, 10.0)])
    return float(optimum.x[0]), float(optimum.x[1])


def _cross_scaled(logits: Floats, labels: Floats, fold: Ints) -> Floats:
    """The logits, scaled by what the other folds say."""
    scaled = np.zeros(len(logits))
    for number in range(FOLDS):
        others, own = fold != number, fold == number
        slope, shift = _platt(logits[others], labels[others])
        scaled[own] = slope * logits[own] + shift
    return scaled


def _log_loss(share: Floats, labels: Floats) -> float:
    p = np.clip(share, 1e-6, 1 - 1e-6)
    return float(-np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p)))


def _auc(logits: Floats, labels: Floats) -> float:
    """The probability that of two prompts with different scores the one with the higher score has the higher logit."""
    right = pairs = 0.0
    distinct = np.unique(labels)
    # over a grid of cuts of the labels, each an ordinary AUC, weighted by its pairs
    for cut in distinct[1:] if len(distinct) <= 20 else np.quantile(labels, np.linspace(0.05, 0.95, 19)):
        good = labels >= cut
        weight = int(good.sum()) * int((~good).sum())
        right += weight * auc(logits.tolist(), good.tolist())
        pairs += weight
    return right / pairs if pairs else 0.5
