"""What a plan's quality is on *new* prompts: less than on those it was chosen on, and by chance more or less. No I/O.

Two things part the mean of the judged prompts from that of new ones. The thresholds were chosen because they do well on the
judged ones: `optimism`, by the bootstrap (Efron, The Estimation of Prediction Error, 2004): routings are chosen on samples
drawn with replacement, each as the cheapest that has the quality there, and what they have less on the whole sample is the
mean of it. And as many new prompts as were judged have a mean of their own: the standard error of the difference of two such
means, which is normal. Neither knows how the plan was looked for, so both hold for every goal and number of tiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from penstock.planner_service.routing.quality import SKIPPED, JudgedSample, Routed, route
from penstock.planner_service.simulator.workload import Floats
from penstock.types.planned import QualityPromise

ROUTINGS = 200  # that are chosen from; drawn, so that any number of tiers takes as long
RESAMPLES = 100


@dataclass(frozen=True, slots=True)
class NewPrompts:
    """What the quality of a routing is on as many new prompts as were judged. optimism: of a plan for `min_quality`, points.

    Of the routings that were tried: qualities (R), errors (R), the standard error of the difference, and costs (R), relative.
    """

    confidence: float
    prompts: int
    optimism: float
    qualities: Floats
    errors: Floats
    costs: Floats

    @property
    def _deviations(self) -> float:
        return NormalDist().inv_cdf(self.confidence)

    def needed(self, min_quality: float) -> float:
        """The mean of the judged prompts with which new ones have `min_quality`, for the cheapest routing that has it.

        Where none that was tried has it, for that which comes nearest.
        """
        least = self.qualities - self.optimism - self._deviations * self.errors
        able = least >= min_quality
        at = int(np.where(able, self.costs, np.inf).argmin() if able.any() else least.argmax())
        return min_quality + self.optimism + self._deviations * float(self.errors[at])

    def promise(self, answered: Floats) -> QualityPromise:
        """Of a plan. answered (N): the quality of the reply to each judged prompt."""
        expected = float(answered.mean()) - self.optimism
        least = expected - self._deviations * _error(answered)
        return QualityPromise(self.confidence, expected, max(0.0, least), self.prompts)


def on_new_prompts(judged: JudgedSample, min_quality: float | None, confidence: float, seed: int) -> NewPrompts:
    """min_quality: that plans are for; None for the most that can be had, at a cost that is not known here: no optimism."""
    rng, count = np.random.default_rng(seed), len(judged)
    routings = _routings(judged, rng)
    routed = [route(judged, thresholds) for thresholds in routings]
    answered = np.array([judged.quality[np.arange(count), one.answered] for one in routed])
    costs = np.array([_costs(one, thresholds) for one, thresholds in zip(routed, routings, strict=True)])
    optimism = 0.0 if min_quality is None else _optimism(answered, costs, min_quality, rng)
    errors = np.array([_error(row) for row in answered])
    return NewPrompts(confidence, count, optimism, answered.mean(axis=1), errors, costs.mean(axis=1))


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


def _optimism(answered: Floats, costs: Floats, min_quality: float, rng: np.random.Generator) -> float:
    """Points; 0 where no routing has the quality. answered (R, N), costs (R, N): of each routing and judged prompt."""
    count = answered.shape[1]
    weights = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES) / count
    there, whole = weights @ answered.T, answered.mean(axis=1)
    able = there >= min_quality
    chosen = np.where(able, weights @ costs.T, np.inf).argmin(axis=1)
    gained = there[np.arange(RESAMPLES), chosen] - whole[chosen]
    gained = gained[able.any(axis=1)]
    return max(0.0, float(gained.mean())) if len(gained) else 0.0


def _error(answered: Floats) -> float:
    """The standard error of the difference between the mean of these and that of as many others."""
    return float(answered.std() * np.sqrt(2 / len(answered)))
