"""What a cascade of measured tiers would save and lose, and by which scorer and thresholds. No I/O.

Thresholds are chosen on four fifths of the prompts and counted on the rest, in turns: what is stated was not fitted to.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from penstock.services.domain.auc import auc

FOLDS = 5
LEVELS = 12
"""Thresholds that are tried of a tier."""
EARLIER_TIERS = 2
"""Before the last one, of the cascades that are tried."""
RESAMPLES = 400
LEAST_ANSWERS = 20
BINS = (20.0, 40.0, 60.0, 80.0, 100.0)
"""Upper ends of the scores that reliability is told for."""


@dataclass(frozen=True, slots=True)
class MeasuredTier:
    """A tier's answers to all prompts. seconds: of work for an answer, on average. scores: by scorer, 0 to 100."""

    name: str
    seconds: float
    right: Sequence[bool]
    scores: dict[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class ScorerWorth:
    """auc: (figure, low, high), of 95 %. reliability: (scores up to, share right, answers)."""

    tier: str
    scorer: str
    auc: tuple[float, float, float]
    reliability: list[tuple[float, float, int]]


@dataclass(frozen=True, slots=True)
class Proposal:
    """thresholds: by tier; none where the last tier alone is the best. right, cost: held out, cost over that of the last tier
    alone. gained: points right over the last tier alone, (figure, low, high). least_cost: with a judge that knows."""

    scorer: str
    thresholds: dict[str, float]
    prompts: int
    right: float
    cost: float
    gained: tuple[float, float, float]
    last_right: float
    least_cost: float

    @property
    def pays(self) -> bool:
        return bool(self.thresholds)


@dataclass(frozen=True, slots=True)
class _Cascade:
    """tiers: indices, the last tier's at the end. thresholds: of the others."""

    scorer: str
    tiers: tuple[int, ...]
    thresholds: tuple[float, ...]


_Results = tuple[list[bool], list[float]]
"""Of each prompt: whether the delivered answer is right, and seconds."""


def worth(tier: MeasuredTier) -> Iterator[ScorerWorth]:
    """How well each scorer tells right answers of a tier from wrong ones; none where all are the same or they are too few."""
    if len(tier.right) < LEAST_ANSWERS or len(set(tier.right)) == 1:
        return
    rng = random.Random(1)
    for scorer, scores in tier.scores.items():
        drawn = list[float]()
        for _ in range(RESAMPLES):
            rows = rng.choices(range(len(scores)), k=len(scores))
            drawn.append(auc([scores[i] for i in rows], [tier.right[i] for i in rows]))
        drawn.sort()
        bins = list[tuple[float, float, int]]()
        for low, high in zip((-1.0, *BINS), BINS, strict=False):
            inside = [good for score, good in zip(scores, tier.right, strict=True) if low < score <= high]
            if inside:
                bins.append((high, sum(inside) / len(inside), len(inside)))
        yield ScorerWorth(tier.name, scorer, _interval(auc(scores, tier.right), drawn), bins)


def propose(tiers: Sequence[MeasuredTier]) -> Proposal | None:
    """The scorer and the thresholds with which the last tier's share of right answers is reached at the least cost.

    None with a single tier or too few prompts.
    """
    count, last = len(tiers[-1].right), len(tiers) - 1
    if len(tiers) == 1 or count < LEAST_ANSWERS:
        return None
    alone: _Results = list(tiers[last].right), [tiers[last].seconds] * count
    best: tuple[float, _Cascade, _Results] | None = None
    for scorer in tiers[0].scores:
        right, seconds = [False] * count, [0.0] * count
        for fold in range(FOLDS):
            fit, rest = ([i for i in range(count) if (i % FOLDS == fold) == held] for held in (False, True))
            chosen = _cheapest(tiers, scorer, fit)
            for i, good, spent in zip(rest, *_results(tiers, chosen, rest), strict=True):
                right[i], seconds[i] = good, spent
        whole = _cheapest(tiers, scorer, range(count))
        if len(whole.tiers) > 1 and sum(right) >= sum(alone[0]) and sum(seconds) < sum(alone[1]):
            best = min(filter(None, (best, (sum(seconds), whole, (right, seconds)))), key=lambda each: each[0])
    cascade, (right, seconds) = (
        best[1:] if best is not None else (_Cascade(next(iter(tiers[0].scores)), (last,), ()), alone)
    )
    gains, rng = list[float](), random.Random(1)
    for _ in range(RESAMPLES):
        rows = rng.choices(range(count), k=count)
        gains.append(100 * sum(right[i] - alone[0][i] for i in rows) / count)
    return Proposal(
        cascade.scorer,
        {tiers[t].name: limit for t, limit in zip(cascade.tiers, cascade.thresholds, strict=False)},
        count,
        sum(right) / count,
        sum(seconds) / sum(alone[1]),
        _interval(100 * (sum(right) - sum(alone[0])) / count, sorted(gains)),
        sum(alone[0]) / count,
        _least_cost(tiers) / tiers[last].seconds,
    )


def _cheapest(tiers: Sequence[MeasuredTier], scorer: str, prompts: Sequence[int]) -> _Cascade:
    """The cheapest cascade that is right as often as the last tier on these prompts."""
    last = len(tiers) - 1
    best = _Cascade(scorer, (last,), ())
    target, cost = sum(tiers[last].right[i] for i in prompts), tiers[last].seconds * len(prompts)
    for size in range(1, min(last, EARLIER_TIERS) + 1):
        for earlier in combinations(range(last), size):
            levels = [_levels([tiers[t].scores[scorer][i] for i in prompts]) for t in earlier]
            for thresholds in product(*levels):
                cascade = _Cascade(scorer, (*earlier, last), thresholds)
                right, seconds = _results(tiers, cascade, prompts)
                if sum(right) >= target and sum(seconds) < cost:
                    best, cost = cascade, sum(seconds)
    return best


def _results(tiers: Sequence[MeasuredTier], cascade: _Cascade, prompts: Sequence[int]) -> _Results:
    right, seconds = list[bool](), list[float]()
    limits = (*cascade.thresholds, float("-inf"))
    for i in prompts:
        spent = 0.0
        for tier, limit in zip((tiers[t] for t in cascade.tiers), limits, strict=True):
            spent += tier.seconds
            if limit == float("-inf") or tier.scores[cascade.scorer][i] >= limit:
                right.append(tier.right[i])
                break
        seconds.append(spent)
    return right, seconds


def _least_cost(tiers: Sequence[MeasuredTier]) -> float:
    """Seconds for an answer of the best pair with the last tier, if the judge knew what is right."""
    last = tiers[-1]
    costs = [tier.seconds + (1 - sum(tier.right) / len(tier.right)) * last.seconds for tier in tiers[:-1]]
    return min(costs)


def _levels(scores: Sequence[float]) -> list[float]:
    ordered = sorted(scores)
    return sorted({ordered[round(i * (len(ordered) - 1) / (LEVELS - 1))] for i in range(LEVELS)})


def _interval(figure: float, drawn: Sequence[float]) -> tuple[float, float, float]:
    return figure, drawn[round(0.025 * (len(drawn) - 1))], drawn[round(0.975 * (len(drawn) - 1))]
