"""What systems of models get right and cost, from each model's records of the same prompts. No I/O.

CPU seconds are those of the records' tokens at the models' costs (`costs`); a rejected answer is the draft of the next one,
where what that saves was measured. Running examples is not counted: some 0.1 s.

A system is a `Policy` with its limits. Limits, the logistic models that make scores of records, and the score predictor (the
planner's) are fitted to the prompts of all folds but one; what is counted is what they do to the prompts of that fold.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from benchmarks.real_models.costs import TokenCost
from benchmarks.real_models.records import Record
from penstock.judge_service.calibration.metrics import folds
from penstock.judge_service.scorers.combined.combination import fitted, held_out_logits
from penstock.judge_service.scoring.interface import probability
from penstock.planner_service.question.score_predictor import train

Numbers = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

RESAMPLES, SEED = 2_000, 7
LIMITS = 24
"""Thresholds that are tried of a tier, quantiles of its scores; of two tiers, every second one of each."""
UNKNOWN = 0.5


def features(record: Record, scorer: str) -> list[float]:
    """What a scorer reads of a record. `believed:MODEL` and `agreement` are there for some records only."""
    shown, passed = record.examples
    examples = float(passed == shown) if shown else UNKNOWN
    match scorer:
        case "examples":
            return [examples]
        case "mean":
            return [record.mean]
        case "least":
            return [record.least]
        case "combined":
            return [examples, record.mean, record.least]
        case "agreement":
            return [sum(record.samples) / len(record.samples)]
    return [record.believed[scorer.removeprefix("believed:")]]


@dataclass(frozen=True, slots=True)
class Model:
    """Its records by prompt, and what tokens cost. believers: what tokens cost the models that are asked about answers.
    drafted: by a model that was asked before, and set: what an answer costs with a rejected one as draft, over its cost."""

    records: Mapping[str, Record]
    cost: TokenCost
    believers: Mapping[str, TokenCost]
    name: str = ""
    drafted: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def cpu_s(self, prompt: str) -> float:
        return self.cost.of(self.records[prompt].tokens)

    def escalated_s(self, prompt: str, before: "Model") -> float:
        """CPU seconds of its answer where the one of the model before it is the draft."""
        return self.cpu_s(prompt) * self.drafted.get((before.name, self.records[prompt].set), 1.0)

    def judging_s(self, prompt: str, scorer: str) -> float:
        """CPU seconds of a scorer beyond what the answer itself costs: samples are as long as the answer, and share its
        prompt; who believes it reads both."""
        record = self.records[prompt]
        if scorer == "agreement":
            return self.cost.of((0, len(record.samples) * record.tokens[1]))
        believer = self.believers.get(scorer.removeprefix("believed:"))
        return believer.of((sum(record.tokens), 1)) if believer else 0.0

    def only(self, records: Mapping[str, Record]) -> "Model":
        return replace(self, records=records)


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of M models to N prompts. right, cpu_s, judging_s, score: (M, N); cut answers have the least score.
    escalated_s: (M, N): CPU seconds after the model before it has answered. predicted: (M, N): the score, 0 to 100, that the
    prompt lets expect.
    """

    right: Bools
    cpu_s: Numbers
    escalated_s: Numbers
    judging_s: Numbers
    score: Numbers
    predicted: Numbers

    def of(self, prompts: npt.NDArray[np.intp]) -> "Answers":
        return Answers(
            self.right[:, prompts],
            self.cpu_s[:, prompts],
            self.escalated_s[:, prompts],
            self.judging_s[:, prompts],
            self.score[:, prompts],
            self.predicted[:, prompts],
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """models: indices, in the order in which they are asked. thresholds: of all but the last. best: of all answers that were
    generated, the one with the highest score is delivered. skip_below: the first model is passed over where less is predicted
    of it. gain: the second model answers where it is predicted to score so much more, and nothing is judged."""

    models: tuple[int, ...]
    thresholds: tuple[float, ...] = ()
    best: bool = False
    skip_below: float = 0.0
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of each prompt, (N,): whether the delivered answer is right, and CPU seconds."""

    right: Bools
    cpu_s: Numbers


def outcome(answers: Answers, policy: Policy) -> Outcome:
    """What a policy does to prompts."""
    count = answers.score.shape[1]
    if policy.gain is not None:
        first, other = policy.models
        passed = answers.predicted[other] > answers.predicted[first] + policy.gain
        models, rows = np.where(passed, other, first), np.arange(count)
        return Outcome(answers.right[models, rows], answers.cpu_s[models, rows])
    if policy.skip_below:
        passed = answers.predicted[policy.models[0]] < policy.skip_below
        whole = replace(policy, skip_below=0.0)
        rest = replace(whole, models=policy.models[1:], thresholds=policy.thresholds[1:])
        cascade, larger = outcome(answers, whole), outcome(answers, rest)
        return Outcome(np.where(passed, larger.right, cascade.right), np.where(passed, larger.cpu_s, cascade.cpu_s))
    right, cpu_s, best = np.zeros(count, bool), np.zeros(count), np.full(count, -np.inf)
    active = np.ones(count, bool)
    for place, model in enumerate(policy.models):
        is_last = place == len(policy.models) - 1
        score, judged = answers.score[model], active & (policy.best or not is_last)
        cost_s = answers.escalated_s if place else answers.cpu_s
        cpu_s += active * cost_s[model] + judged * answers.judging_s[model]
        takes = active & ((score > best) if policy.best else True)
        right[takes], best[takes] = answers.right[model, takes], score[takes]
        if not is_last:
            active = active & (score < policy.thresholds[place])
    return Outcome(right, cpu_s)


def read_answers(
    models: Sequence[Model],
    scorer: str,
    prompts: Sequence[str],
    fit: npt.NDArray[np.intp],
    texts: Sequence[str] | None = None,
) -> Answers:
    """The answers with scores and predictions fitted to the prompts `fit`; those of `fit` itself are held out in folds.

    texts: of the prompts, for predictions; without, all are 0.
    """
    table = [[model.records[prompt] for prompt in prompts] for model in models]
    right = np.array([[bool(record.right) for record in row] for row in table])
    cut = np.array([[record.truncated for record in row] for row in table])
    score = np.array([_scored([features(each, scorer) for each in row], right[m], fit) for m, row in enumerate(table)])
    score = np.where(cut, -np.inf, score)
    return Answers(
        right,
        np.array([[model.cpu_s(prompt) for prompt in prompts] for model in models]),
        np.array(
            [
                [model.escalated_s(prompt, before) for prompt in prompts]
                for before, model in pairwise([models[0], *models])
            ]
        ),
        np.array([[model.judging_s(prompt, scorer) for prompt in prompts] for model in models]),
        score,
        np.zeros_like(score) if texts is None else _predicted(texts, score, fit),
    )


def _predicted(texts: Sequence[str], score: Numbers, fit: npt.NDArray[np.intp]) -> Numbers:
    points = 100 * np.vectorize(probability)(score)
    trained = train([texts[i] for i in fit], [str(m) for m in range(len(score))], points[:, fit].T)
    predicted = np.array([[*trained.predictor.predict(text).values()] for text in texts]).T
    predicted[:, fit] = trained.predicted.T
    return predicted


def _scored(values: Sequence[Sequence[float]], right: Bools, fit: npt.NDArray[np.intp]) -> Numbers:
    x = np.asarray(values, float)
    model = fitted(x[fit], right[fit])
    logits = np.array([model.logit(row) for row in x])
    logits[fit] = held_out_logits(x[fit], right[fit], [*range(len(fit))])
    return logits


def policies(answers: Answers, models: tuple[int, ...], kind: str) -> Iterator[Policy]:
    """All cascades of these models that are tried, with limits from these answers; the last model alone, too."""
    yield Policy(models[-1:])
    steps = LIMITS if len(models) == 2 else LIMITS // 2
    limits = [_quantiles(answers.score[model], steps) for model in models[:-1]]
    skips = [0.0, *_quantiles(answers.predicted[models[0]], steps)] if kind == "skipping" else [0.0]
    for thresholds, skip_below in product(product(*limits), skips):
        yield Policy(models, thresholds, kind == "best", skip_below)


def routings(answers: Answers, models: tuple[int, int]) -> Iterator[Policy]:
    """All routings before generation between two models that are tried."""
    first, other = models
    for limit in (-np.inf, *_quantiles(answers.predicted[other] - answers.predicted[first], LIMITS), np.inf):
        yield Policy(models, gain=float(limit))


def _quantiles(values: Numbers, count: int) -> list[float]:
    finite = values[np.isfinite(values)]
    return sorted({float(v) for v in np.quantile(finite, np.linspace(0, 1, count))}) if len(finite) else [0.0]


def chosen(answers: Answers, tried: Iterator[Policy], large: int, goal: str) -> Policy:
    """`cheap`: the cheapest that is right as often as the large model alone. `right`: the best that costs no more than it."""
    alone = outcome(answers, Policy((large,)))
    best: tuple[tuple[float, float], Policy] = (np.inf, np.inf), Policy((large,))
    for policy in tried:
        result = outcome(answers, policy)
        right, cpu_s = float(result.right.mean()), float(result.cpu_s.mean())
        if goal == "cheap" and right >= alone.right.mean():
            best = min(best, ((cpu_s, -right), policy), key=lambda each: each[0])
        if goal == "right" and cpu_s <= alone.cpu_s.mean():
            best = min(best, ((-right, cpu_s), policy), key=lambda each: each[0])
    return best[1]


@dataclass(frozen=True, slots=True)
class System:
    """What is fitted: `models` by index, asked in this order; its scorer; its kind, `cascade`, `best` (of all answers),
    `skipping` (the first model where its predicted score is low) or `routing`."""

    models: tuple[int, ...]
    scorer: str
    kind: str = "cascade"

    def tried(self, answers: Answers) -> Iterator[Policy]:
        if self.kind == "routing":
            return routings(answers, (self.models[0], self.models[-1]))
        return policies(answers, self.models, self.kind)


def cross_fitted(
    models: Sequence[Model], texts: Mapping[str, str], prompts: Sequence[str], system: System, goal: str
) -> Outcome:
    """What a system does to prompts that nothing was fitted to. texts: of all prompts."""
    fold, predicted_from = folds(prompts), None
    if system.kind in ("skipping", "routing"):
        predicted_from = [texts[prompt] for prompt in prompts]
    right, cpu_s = np.zeros(len(prompts), bool), np.zeros(len(prompts))
    for number in np.unique(fold):
        fit, rest = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        answers = read_answers(models, system.scorer, prompts, fit, predicted_from)
        fitting = answers.of(fit)
        policy = chosen(fitting, system.tried(fitting), system.models[-1], goal)
        result = outcome(answers.of(rest), policy)
        right[rest], cpu_s[rest] = result.right, result.cpu_s
    return Outcome(right, cpu_s)


def mixed(small: Outcome, large: Outcome, cpu_s: float) -> float:
    """The share right of drawing one of two models at random for each prompt, at these mean CPU seconds."""
    low, high = float(small.cpu_s.mean()), float(large.cpu_s.mean())
    share = 1.0 if high == low else float(np.clip((cpu_s - low) / (high - low), 0, 1))
    return (1 - share) * float(small.right.mean()) + share * float(large.right.mean())


def compared(one: Outcome, other: Outcome) -> dict[str, list[float]]:
    """Paired differences to another system, each (figure, low, high): points right, and CPU over its CPU. 95 % by bootstrap
    over prompts."""
    rows = np.random.default_rng(SEED).integers(0, len(one.right), (RESAMPLES, len(one.right)))
    points = (one.right.astype(float) - other.right)[rows].mean(axis=1) * 100
    ratios = one.cpu_s[rows].sum(axis=1) / other.cpu_s[rows].sum(axis=1)
    whole = 100 * float(one.right.mean() - other.right.mean()), float(one.cpu_s.sum() / other.cpu_s.sum())
    return {
        name: [round(figure, 3), *(round(float(q), 3) for q in np.quantile(drawn, (0.025, 0.975)))]
        for name, figure, drawn in (("points", whole[0], points), ("cpu", whole[1], ratios))
    }


def with_belief(records: Mapping[str, Record], scorer: str) -> Mapping[str, Record]:
    """The records that have what a scorer reads."""
    if scorer == "agreement":
        return {name: each for name, each in records.items() if each.samples}
    judge = scorer.removeprefix("believed:")
    return {name: each for name, each in records.items() if judge == scorer or judge in each.believed}
