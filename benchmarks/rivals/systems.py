"""Ways to serve prompts with some of the tiers, and the cheapest of each kind for a quality, by arithmetic on arrays.

A cascade asks its tiers in their order, but for those that are skipped because their predicted score is below a limit, until
a score is at least the threshold. With drafts, a tier gets the rejected answer of an earlier one. Routing before generation
asks one tier, by predicted scores and mean costs. A mixture sends a random part of the prompts to each of two tiers.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from benchmarks.rivals.families import Prompts
from penstock.planner_service.simulator.workload import Bools, Floats

LEVELS = 32  # thresholds that are tried of a tier, at quantiles of its scores
LIMITS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # quantiles of predicted scores, below which a tier is skipped
PRICES = np.concatenate(
    [[0.0], np.geomspace(1e-2, 1e4, 160)]
)  # points of quality that the largest tier's cost is worth
EPSILON = 1e-9


class System(Protocol):
    """A tuned way to serve prompts."""

    def run(self, prompts: Prompts) -> tuple[float, float]:
        """(GPU seconds of a prompt, mean quality)."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """A system and what it costs and reaches on the prompts that it was tuned on."""

    system: System
    gpu_s: float
    quality: float


@dataclass(frozen=True, slots=True)
class Cascade:
    """tiers: by number. thresholds, limits: of the tiers but the last; a tier is skipped below its limit."""

    tiers: tuple[int, ...]
    thresholds: tuple[float, ...]
    limits: tuple[float, ...]
    drafts: bool

    def run(self, prompts: Prompts) -> tuple[float, float]:
        levels = [np.array([threshold]) for threshold in self.thresholds]
        gpu_s, quality = _surface(prompts, self.tiers, self.limits, levels, drafts=self.drafts)
        return float(gpu_s.item()), float(quality.item())


@dataclass(frozen=True, slots=True)
class Routing:
    """Each prompt goes to the tier with the highest predicted score, less `price` for its mean cost. costs (C): of each tier,
    over that of the dearest."""

    price: float
    costs: tuple[float, ...]

    def run(self, prompts: Prompts) -> tuple[float, float]:
        chosen = (prompts.predicted - self.price * np.array(self.costs)).argmax(axis=1)
        rows = np.arange(len(chosen))
        return float(prompts.fresh_s[rows, chosen].mean()), float(prompts.quality[rows, chosen].mean())


@dataclass(frozen=True, slots=True)
class Mixture:
    """A part of the prompts at random to the second of two tiers, the others to the first."""

    tiers: tuple[int, int]
    second: float

    def run(self, prompts: Prompts) -> tuple[float, float]:
        parts = np.array([1 - self.second, self.second])
        means = (values[:, list(self.tiers)].mean(axis=0) for values in (prompts.fresh_s, prompts.quality))
        gpu_s, quality = (float(parts @ each) for each in means)
        return gpu_s, quality


def cascades(
    prompts: Prompts, tiers: tuple[int, ...], targets: Sequence[float], *, drafts: bool, skips: bool
) -> list[Tuned | None]:
    """The cheapest cascade of these tiers for each target; None where none reaches it."""
    best: list[Tuned | None] = [None] * len(targets)
    for limits in _limits(prompts, tiers, skips=skips):
        levels = [_levels(prompts.scores[:, tier]) for tier in tiers[:-1]]
        gpu_s, quality = _surface(prompts, tiers, limits, levels, drafts=drafts)
        for place, target in enumerate(targets):
            costs = np.where(quality >= target - EPSILON, gpu_s, np.inf)
            at = np.unravel_index(int(costs.argmin()), costs.shape)
            known = best[place]
            if np.isfinite(costs[at]) and (known is None or costs[at] < known.gpu_s):
                thresholds = tuple(float(level[i]) for level, i in zip(levels, at, strict=True))
                system = Cascade(tiers, thresholds, limits, drafts)
                best[place] = Tuned(system, float(costs[at]), float(quality[at]))
    return best


def load_based(prompts: Prompts, targets: Sequence[float]) -> list[Tuned | None]:
    """The full cascade with the thresholds of the least work by mean costs, whatever it is that escalates."""
    tiers = tuple(range(len(prompts.tiers)))
    levels = [_levels(prompts.scores[:, tier]) for tier in tiers[:-1]]
    limits = (-1.0,) * (len(tiers) - 1)
    guessed, quality = _surface(_alike(prompts), tiers, limits, levels, drafts=False)
    result: list[Tuned | None] = []
    for target in targets:
        costs = np.where(quality >= target - EPSILON, guessed, np.inf)
        at = np.unravel_index(int(costs.argmin()), costs.shape)
        system = Cascade(tiers, tuple(float(level[i]) for level, i in zip(levels, at, strict=True)), limits, False)
        result.append(Tuned(system, *system.run(prompts)) if np.isfinite(costs[at]) else None)
    return result


def routings(prompts: Prompts, targets: Sequence[float]) -> list[Tuned | None]:
    """The cheapest routing before generation for each target."""
    means = prompts.fresh_s.mean(axis=0)
    systems = [Routing(float(price), tuple((means / means.max()).tolist())) for price in PRICES]
    tried = [Tuned(system, *system.run(prompts)) for system in systems]
    return [_cheapest(tried, target) for target in targets]


def alone(prompts: Prompts, tier: int, targets: Sequence[float]) -> list[Tuned | None]:
    """One tier for all prompts."""
    system = Cascade((tier,), (), (), False)
    return [_cheapest([Tuned(system, *system.run(prompts))], target) for target in targets]


def mixtures(prompts: Prompts, targets: Sequence[float]) -> list[Tuned | None]:
    """The cheapest random mixture of any two tiers: the envelope of single ones."""
    quality, result = prompts.quality.mean(axis=0), list[Tuned | None]()
    for target in targets:
        tried = []
        for one, other in itertools.permutations(range(len(quality)), 2):
            if quality[one] < target - EPSILON <= quality[other]:
                system = Mixture((one, other), float((target - quality[one]) / (quality[other] - quality[one])))
                tried.append(Tuned(system, *system.run(prompts)))
        result.append(_cheapest(tried, target))
    return result


def _cheapest(tried: Sequence[Tuned], target: float) -> Tuned | None:
    able = [choice for choice in tried if choice.quality >= target - EPSILON]
    return min(able, key=lambda choice: choice.gpu_s, default=None)


def _limits(prompts: Prompts, tiers: tuple[int, ...], *, skips: bool) -> Iterator[tuple[float, ...]]:
    tried = LIMITS if skips else ()
    yield from itertools.product(
        *([-1.0, *map(float, np.quantile(prompts.predicted[:, t], tried))] for t in tiers[:-1])
    )


def _levels(scores: Floats) -> Floats:
    """Thresholds to try: 0, which accepts all without a judge, and scores at quantiles."""
    return np.unique([0.0, *np.quantile(scores, np.linspace(0, 1, LEVELS))])


def _alike(prompts: Prompts) -> Prompts:
    """The prompts as if each cost the mean."""

    def mean(values: Floats) -> Floats:
        return np.repeat(values.mean(axis=0)[None], len(values), axis=0)

    return replace(
        prompts,
        fresh_s=mean(prompts.fresh_s),
        drafted_s=mean(prompts.drafted_s),
        judging_s=mean(prompts.judging_s),
    )


def _surface(
    prompts: Prompts, tiers: tuple[int, ...], limits: Sequence[float], levels: Sequence[Floats], *, drafts: bool
) -> tuple[Floats, Floats]:
    """(GPU seconds of a prompt, mean quality), each (L1, ..., Lk) for all thresholds of the k tiers before the last.

    With whether a prompt gets to a tier, for each choice of thresholds so far, sums over prompts are products of matrices.
    """
    count = len(prompts.quality)
    gpu_s, quality = np.zeros((1, 1)), np.zeros((1, 1))
    reaching = passed = np.ones((1, count))  # a tier by all thresholds before the last one, and past that one's tier
    drafted = np.zeros(
        count, np.bool_
    )  # of those that reach the tier, which have a rejected answer: whatever the thresholds
    for tier, limit, of_tier in zip(tiers[:-1], limits, levels, strict=True):
        reaching = (reaching[:, None] * passed[None]).reshape(-1, count)
        is_used: Bools = prompts.predicted[:, tier] >= limit
        rejected = prompts.scores[None, :, tier] < of_tier[:, None]  # (L, N)
        each_s = np.where(drafted, prompts.drafted_s[:, tier], prompts.fresh_s[:, tier])
        judged_s = (of_tier > 0)[:, None] * prompts.judging_s[None, :, tier]
        gpu_s = gpu_s.reshape(-1, 1) + reaching @ (is_used * (each_s + judged_s)).T / count
        quality = quality.reshape(-1, 1) + reaching @ (is_used * ~rejected * prompts.quality[:, tier]).T / count
        passed = np.where(is_used, rejected, True).astype(np.float64)
        drafted = drafted | (is_used & drafts)
    each_s = np.where(drafted, prompts.drafted_s[:, tiers[-1]], prompts.fresh_s[:, tiers[-1]])
    gpu_s = gpu_s + (reaching * each_s) @ passed.T / count
    quality = quality + (reaching * prompts.quality[:, tiers[-1]]) @ passed.T / count
    shape = tuple(len(of_tier) for of_tier in levels)
    return gpu_s.reshape(shape), quality.reshape(shape)
