"""What a plan's quality is on *new* prompts: less than on those it was chosen on, and by chance more or less. No I/O.

Two things part the mean of the judged prompts from that of new ones. The thresholds were chosen because they do well on the
judged ones: `optimism`, by the bootstrap (Efron, The Estimation of Prediction Error, 2004): routings are chosen on samples
drawn with replacement, each as the cheapest that has the quality there, and what they have less on the whole sample is the
mean of it. And as many new prompts as were judged have a mean of their own: the standard error of the difference of two such
means, which is normal. Neither knows how the plan was looked for, so both hold for every goal and number of tiers.
"""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from penstock.planner_service.routing.quality import SKIPPED, JudgedSample, Routed, route, routed_sample
from penstock.planner_service.simulator.workload import Floats
from penstock.types.planned import QualityPromise

ROUTINGS = 200  # of cascades, and as many of routed prompts, that are chosen from; drawn, for any number of tiers
RESAMPLES = 100


class NewPrompts:
    """What the quality of routings is on as many new prompts as were judged, with a confidence, from 0.5 to under 1."""

    def __init__(self, judged: JudgedSample, confidence: float, seed: int) -> None:
        rng, count = np.random.default_rng(seed), len(judged)
        samples = [judged] if judged.predicted is None or judged.under_rules else [judged, routed_sample(judged)]
        routings = [(sample, thresholds) for sample in samples for thresholds in _routings(sample, rng)]
        routed = [route(*routing) for routing in routings]
        answered = np.array([judged.quality[np.arange(count), one.answered] for one in routed])
        costs = np.array([_costs(one, thresholds) for one, (_, thresholds) in zip(routed, routings, strict=True)])
        weights = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES) / count
        self._confidence, self._prompts = confidence, count
        self._deviations = NormalDist().inv_cdf(confidence)
        # of R routings on the judged prompts, (R), and on each resample, (RESAMPLES, R)
        self._qualities, self._costs = answered.mean(axis=1), costs.mean(axis=1)
        self._qualities_there, self._costs_there = weights @ answered.T, weights @ costs.T
        self._errors = np.array([_error(row) for row in answered])

    def needed(self, min_quality: float) -> float:
        """The mean of the judged prompts with which new ones have `min_quality`, for the cheapest routing that has it.

        Where none that was tried has it, for that which comes nearest.
        """
        optimism = self._optimism(min_quality)
        least = self._qualities - optimism - self._deviations * self._errors
        able = least >= min_quality
        at = int(np.where(able, self._costs, np.inf).argmin() if able.any() else least.argmax())
        return min_quality + optimism + self._deviations * float(self._errors[at])

    def promise(self, answered: Floats, min_quality: float | None) -> QualityPromise:
        """Of a plan for `min_quality`; None: for the most that can be had, with no optimism that is known here.

        answered (N): the quality of the reply to each judged prompt.
        """
        expected = float(answered.mean()) - (0.0 if min_quality is None else self._optimism(min_quality))
        least = expected - self._deviations * _error(answered)
        return QualityPromise(self._confidence, expected, max(0.0, least), self._prompts)

    def _optimism(self, min_quality: float) -> float:
        """Points, of the cheapest routing that has the quality; 0 where none has it."""
        able = self._qualities_there >= min_quality
        chosen = np.where(able, self._costs_there, np.inf).argmin(axis=1)
        gained = self._qualities_there[np.arange(RESAMPLES), chosen] - self._qualities[chosen]
        gained = gained[able.any(axis=1)]
        return max(0.0, float(gained.mean())) if len(gained) else 0.0


def _routings(judged: JudgedSample, rng: np.random.Generator) -> list[tuple[float, ...]]:
    """Thresholds at quantiles of the scores, drawn; a tier is passed over as often as a third of the time."""
    lower = len(judged.tiers) - 1
    levels = [np.sort(judged.scores[:, tier]) for tier in range(lower)]
    at = rng.random((ROUTINGS, lower)) * 1.5
    drawn = (
        tuple(float(levels[tier][int(share * len(judged))]) if share < 1 else SKIPPED for tier, share in enumerate(row))
        for row in at.tolist()
    )
    return list(dict.fromkeys([*drawn, (SKIPPED,) * lower]))


def _costs(routed: Routed, thresholds: Sequence[float]) -> Floats:
    """(N) of each prompt, if each tier costs twice the one below it: which routings are chosen hardly depends on it."""
    used = [limit <= 100 for limit in (*thresholds, 0.0)]
    return np.asarray((used * 2.0 ** np.arange(len(used))) @ routed.processed)


def _error(answered: Floats) -> float:
    """The standard error of the difference between the mean of these and that of as many others."""
    return float(answered.std() * np.sqrt(2 / len(answered)))
