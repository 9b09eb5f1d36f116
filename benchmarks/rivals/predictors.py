"""Scores predicted from prompts: the best predictor that the data of a family allow, calibrated.

With texts: TF-IDF of words and pairs of words; else the prompt's length and the collection it is from. On each a logistic
regression and gradient boosting, each calibrated by isotonic regression on predictions out of fold. Per tier the one with the
least squared error there is taken. Needs scikit-learn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import OneHotEncoder

from benchmarks.rivals.families import Family
from penstock.planner_service.question.score_predictor import calibration_error
from penstock.planner_service.simulator.workload import Floats, Ints

FOLDS = 4
WORDS, LEAST_PROMPTS, COMPONENTS = (
    20_000,
    3,
    48,
)  # of TF-IDF: terms, prompts that a term is in, dimensions for the trees
Fit = Callable[[Any, Floats, int], Callable[[Any], Floats]]


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """training, unseen (N, C): scores expected from prompts; of the training prompts by models of the other folds.

    By tier, methods: which predictor is best. squared_error: of what it expects out of fold. calibration_error: in points, on
    unseen prompts.
    """

    training: Floats
    unseen: Floats
    methods: tuple[str, ...]
    squared_error: tuple[float, ...]
    calibration_error: tuple[float, ...]


def predict(family: Family, training: Ints, unseen: Ints, seed: int) -> Predicted:
    """For prompts of a family, by row: fitted to the training ones alone."""
    columns: list[tuple[Floats, Floats]] = []
    methods, errors, calibration = [], [], []
    predictors = _features(family, training)
    for tier in range(len(family.tiers)):
        scores = family.quality[:, tier]
        fitted = []
        for name, fit, of in predictors:
            out_of_fold, other = _cross_fitted(fit, of, scores, training, unseen, seed)
            calibrated = IsotonicRegression(out_of_bounds="clip").fit(out_of_fold, scores[training])
            expected = calibrated.predict(out_of_fold)
            error = float(((expected - scores[training]) ** 2).mean())
            fitted.append((error, name, expected, np.asarray(calibrated.predict(other))))
        error, name, expected, other = min(fitted, key=lambda one: one[:2])
        columns.append((expected, other))
        methods.append(name)
        errors.append(error)
        calibration.append(calibration_error(other, scores[unseen]))
    known, others = (np.stack(side, axis=1) for side in zip(*columns, strict=True))
    return Predicted(known, others, tuple(methods), tuple(errors), tuple(calibration))


def _features(family: Family, training: Ints) -> list[tuple[str, Fit, Any]]:
    """The predictors to try: name, how each is fitted, and what it reads of all prompts."""
    tokens = np.log1p(family.input_tokens.astype(float))
    lengths = np.stack([tokens, tokens**2], axis=1)
    lengths = (lengths - lengths[training].mean(axis=0)) / lengths[training].std(axis=0)
    if not family.texts:
        sources = np.array(family.sources)[:, None]
        encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(sources[training])
        known = np.hstack([lengths, encoder.transform(sources)])
        return [("length and source, logistic", _logistic, known), ("length and source, boosting", _boosting, known)]
    words = TfidfVectorizer(ngram_range=(1, 2), max_features=WORDS, min_df=LEAST_PROMPTS, sublinear_tf=True)
    sparse = words.fit([family.texts[row] for row in training]).transform(family.texts)
    reduced = TruncatedSVD(COMPONENTS, random_state=0).fit(sparse[training]).transform(sparse)
    return [("TF-IDF, logistic", _logistic, sparse), ("TF-IDF, boosting", _boosting, np.hstack([reduced, lengths]))]


def _cross_fitted(
    fit: Fit, features: Any, scores: Floats, training: Ints, unseen: Ints, seed: int
) -> tuple[Floats, Floats]:
    """(of the training prompts, each by the models of the other folds; of the unseen ones, by a model of all)."""
    expected = np.empty(len(training))
    places = np.random.default_rng(seed).permutation(len(training))
    for fold in np.array_split(places, FOLDS):
        others = np.setdiff1d(places, fold)
        model = fit(features[training[others]], scores[training[others]], seed)
        expected[fold] = model(features[training[fold]])
    return expected, fit(features[training], scores[training], seed)(features[unseen])


def _logistic(features: Any, scores: Floats, seed: int) -> Callable[[Any], Floats]:
    """A score of s counts as s parts of a success and 100 - s of a failure."""
    rows = np.tile(np.arange(len(scores)), 2)
    labels = np.repeat([1, 0], len(scores))
    weights = np.concatenate([scores, 100.0 - scores]) / 100.0
    if scores.std() == 0.0:
        return lambda rows: np.full(rows.shape[0], scores[0])
    model = LogisticRegression(C=1.0, max_iter=200, random_state=seed).fit(features[rows], labels, weights)
    return lambda rows: np.asarray(100.0 * model.predict_proba(rows)[:, 1])


def _boosting(features: Any, scores: Floats, seed: int) -> Callable[[Any], Floats]:
    model = HistGradientBoostingRegressor(max_iter=60, learning_rate=0.08, max_leaf_nodes=15, random_state=seed)
    model.fit(features, scores)
    return lambda rows: np.asarray(model.predict(rows))
