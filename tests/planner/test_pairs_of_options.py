"""All pairs of options of a planning question: each is refused by the table before the search, or planned together."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from penstock.planner_service.api import plans
from penstock.planner_service.planning.sweep import Axis
from penstock.planner_service.question.exclusions import (
    AT_ONCE,
    DRAFTED,
    GRADED,
    IN_FORCE,
    REMOTE,
    SLOS,
    SWEEP,
    TABLE,
    TOO_MANY,
    UNPREDICTED,
    Exclusion,
)
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.replay.slo_classes import WorkloadClass
from penstock.planner_service.routing.quality import route
from penstock.services.acceptance.pipeline import RULES
from penstock.services.domain.errors import InvalidRequest
from penstock.types.planning import (
    Cascade,
    CascadeJudge,
    CascadeTier,
    Cluster,
    Dispatch,
    Drafter,
    Goal,
    Gpu,
    GpuType,
    JudgedPrompt,
    JudgedPrompts,
    LengthSource,
    Model,
    Objective,
    PlanningQuestion,
    PlanOptions,
    RemoteApi,
    Speculation,
    Trace,
)
from penstock.types.rules import RuleOptions

Change = dict[str, Any]

MODELS = ("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
JUDGE = CascadeJudge(model="judge", pass_s=0.004, token_s=0.00002)
MIN_QUALITY, MAX_LATENCY_S, GPUS = 60.0, 60.0, 4
PROMPTS, REQUESTS = 40, 20
CHAT = WorkloadClass("chat", 5.0, 0.5, 1.0)


@dataclass(frozen=True)
class Files:
    """What a question about four GPUs is for. slos: whether the plan is made for SLO classes."""

    tiers: int = 2
    remote: bool = False
    judge: CascadeJudge | None = None
    drafters: bool = False
    rejected: bool = False
    types: int = 1
    cached: bool = False
    qualities: bool = False
    gap_s: float = 0.5
    slos: bool = False
    predicted: bool = True

    @property
    def cascade(self) -> Cascade:
        tiers = [CascadeTier(f"tier{i}", Model(name)) for i, name in enumerate(MODELS[: self.tiers])]
        if self.drafters:
            drafts = Speculation((Drafter(Model("qwen2.5-0.5b"), 0.7),))
            tiers[0] = dataclasses.replace(tiers[0], speculation=drafts)
        if self.rejected:
            tiers = [dataclasses.replace(tier, draft_acceptance=0.8) for tier in tiers]
        if self.remote:
            api = RemoteApi(1.0, 4.0, 0.5, 0.01)
            tiers[-1] = dataclasses.replace(tiers[-1], model=Model("api"), remote=api, draft_acceptance=0.0)
        return Cascade(tuple(tiers), 0.05, judge=self.judge)

    @property
    def cluster(self) -> Cluster:
        one = GpuType(Gpu("h100"), 1, GPUS, 50.0, 3.0)
        two = GpuType(Gpu("h100"), 1, GPUS // 2, 50.0, 3.0), GpuType(Gpu("l40s"), 1, GPUS // 2, 25.0, 1.0)
        return Cluster((one,) if self.types == 1 else two)

    @property
    def trace(self) -> Trace:
        return Trace.of((i * self.gap_s, 100, 40, 50 if self.cached else 0) for i in range(2 * REQUESTS))

    @property
    def judged(self) -> JudgedPrompts:
        rng = np.random.default_rng(4)
        return JudgedPrompts(tuple(self._prompt(rng) for _ in range(PROMPTS)))

    def _prompt(self, rng: np.random.Generator) -> JudgedPrompt:
        """With few scores and lengths, so that there are few routings; larger models are better."""
        first = int(rng.choice((25, 75, 75)))
        scores = tuple(min(100.0, first + 25.0 * tier) for tier in range(self.tiers))
        tokens = tuple(int(n) for n in rng.choice((20, 60), self.tiers))
        return JudgedPrompt(
            int(rng.choice((50, 200))),
            tokens,
            scores,
            scores if self.predicted else (),
            tuple(score - 5.0 for score in scores) if self.qualities else (),
        )


@dataclass(frozen=True)
class Option:
    """change: of fields of the question, of its rules (`rules.skip`) and of Files. needs: the same, where the other option of
    a pair does not say otherwise. honoured: whether a plan is for it."""

    name: str
    change: Change
    honoured: Callable[[plans.Planned], Any] = lambda _: True
    needs: Change = field(default_factory=dict)


def _ruled(name: str, honoured: Callable[[plans.Planned], Any] = lambda _: True, **values: Any) -> Option:
    return Option(name, {f"rules.{rule}": value for rule, value in values.items()}, honoured)


def _best(goal: Goal) -> Option:
    return Option(f"goal: {goal}", {"goal": goal}, lambda p: p.plan.goal is goal)


def _meant(objective: Objective) -> Option:
    return Option(f"objective: {objective}", {"objective": objective}, lambda p: p.plan.objective is objective)


def is_unjudged(planned: plans.Planned) -> bool:
    """Whether one model or a predictor decides."""
    return len(planned.plan.tiers) == 1 or planned.plan.is_routed


OPTIONS = (
    *(_best(goal) for goal in Goal),
    *(_meant(objective) for objective in Objective),
    Option("percentile", {"percentile": 90.0}, lambda p: p.plan.percentile == 90),
    Option("max_utilisation", {"max_utilisation": 0.5}, lambda p: max(p.plan.utilisation) <= 0.5 + 1e-9),
    Option("allow_overload", {"allow_overload": True}),
    Option("gpus", {"gpus": 3}, lambda p: p.plan.gpus <= 3),
    Option("confidence", {"confidence": 0.6}, lambda p: p.plan.promise and p.plan.promise.confidence == 0.6),
    Option("dispatch", {"dispatch": Dispatch.ROUND_ROBIN}, lambda p: p.plan.dispatch is Dispatch.ROUND_ROBIN),
    Option("requests", {"requests": 30}, lambda p: p.plan.requests == 30),
    Option("runs", {"runs": 1}, lambda p: p.plan.felt_interval is not None),
    Option(
        "lengths: trace", {"lengths": LengthSource.TRACE}, lambda p: set(p.demand.requests.output_tokens.flat) == {40}
    ),
    Option("rate", {"rate": 3.0}, lambda p: p.plan.goal is Goal.RATE or p.plan.rate_per_s == pytest.approx(3)),
    Option("ignore_cached", {"ignore_cached": True}, lambda p: p.plan.cached_share == 0),
    Option("max_tiers", {"max_tiers": 1}, lambda p: sum(tier.strategy.used for tier in p.plan.tiers) == 1),
    Option("min_tiers", {"max_tiers": 2, "min_tiers": 2}, lambda p: len(p.plan.tiers) == 2),
    Option("candidates", {"tiers": 4, "max_tiers": 3}, lambda p: p.plan.choice and p.plan.choice.cascades in (14, 24)),
    _ruled("rules.skip", skip=True),
    _ruled("rules.long_answers", long_answers=True),
    _ruled("rules.best_answer", best_answer=True),
    Option("remote tiers", {"remote": True}, lambda p: p.plan.dollars_per_hour is not None),
    Option("a tier that grades", {"judge": CascadeJudge(tier="tier1")}, lambda p: p.plan.grading or is_unjudged(p)),
    Option("a judge model", {"judge": JUDGE}, lambda p: p.plan.grading or is_unjudged(p)),
    Option("several types", {"types": 2}, lambda p: len(p.site.types) == 2),
    Option("four tiers", {"tiers": 4}, lambda p: len(p.plan.tiers) == 4 or p.plan.choice),
    Option("drafters", {"drafters": True}),
    Option("drafts of rejected answers", {"rejected": True}),
    Option("cached", {"cached": True}, lambda p: p.plan.cached_share > 0 or p.options.ignore_cached),
    Option("qualities", {"qualities": True}),
    Option("SLO classes", {"slos": True}, lambda p: [one.name for one in p.compared([CHAT]).slo] == ["chat"]),
    Option("arrivals at once", {"gap_s": 0.0}, lambda p: p.plan.load is None),
    Option("no predictions", {"predicted": False}),
    Option("no max_latency_s", {"max_latency_s": None}),
    Option("no min_quality", {"min_quality": None}, needs={"goal": Goal.QUALITY}),
)
PAIRS = [
    pair
    for pair in itertools.combinations(OPTIONS, 2)
    if all(pair[0].change[name] == pair[1].change[name] for name in pair[0].change.keys() & pair[1].change.keys())
]


def asked(change: Change) -> tuple[PlanningQuestion, Files]:
    """The question with these changes, and what it is for."""
    of_files = {one.name for one in dataclasses.fields(Files)}
    files = Files(**{name: value for name, value in change.items() if name in of_files})
    rules = {name.removeprefix("rules."): value for name, value in change.items() if name.startswith("rules.")}
    usual = {"min_quality": MIN_QUALITY, "max_latency_s": MAX_LATENCY_S, "requests": REQUESTS, "runs": 0}
    options = {name: value for name, value in change.items() if name not in of_files and "." not in name}
    return (
        PlanningQuestion(
            cluster=files.cluster,
            models=files.cascade,
            trace=files.trace,
            quality=files.judged,
            rules=RuleOptions(**rules),
            **usual | options,
        ),
        files,
    )


def planned(change: Change) -> plans.Planned | str:
    """The plan; or the field for which the table refuses the question, before anything is tried."""
    question, files = asked(change)
    tried = list[int]()
    try:
        return plans.plan(question, tried.append, for_slos=files.slos)
    except InvalidRequest as error:
        (problem,) = error.problems
        assert not tried, f"refused in the search: {problem}"
        assert any(row.field == problem.field and said(row, problem.problem) for row in TABLE), (
            f"not by the table: {problem}"
        )
        return problem.field


def said(row: Exclusion, problem: str) -> bool:
    before, _, after = row.why.partition("{}")
    return problem.startswith(before) and problem.endswith(after)


def is_sound(result: plans.Planned) -> bool:
    """Whether a plan has the quality and the latency that were asked for and that a simulation of it has, and no rules that
    were not asked for, but for those by which prompts are routed."""
    options, plan = result.options, result.plan
    rules = [plan.is_routed or rule.asked(options.rules) for rule in RULES if rule.value(plan.rules)]
    demand = result.demand.under(plan.rules)
    quality = route(demand.judged, plan.thresholds).quality
    enough = options.min_quality is None or quality >= options.min_quality - 1e-9
    seconds = plan.felt_s
    if plan.objective is not Objective.LARGEST_TIER:  # which is of each tier by itself
        factor = 1.0 if plan.rate_per_s is None else plan.rate_per_s / (demand.rate_per_s or 1.0)
        strategies = [tier.strategy for tier in plan.tiers]
        run = run_cascade(result.site, demand.scaled(factor), plan.thresholds, strategies, plan.dispatch)
        seconds = run.latency_s(plan.objective, plan.percentile)
    fast = options.max_latency_s is None or seconds <= options.max_latency_s
    return all(rules) and enough and fast and (plan.quality, plan.felt_s) == pytest.approx((quality, seconds))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_planned_alone(option: Option) -> None:
    result = planned(option.needs | option.change)
    assert not isinstance(result, str), result
    assert is_sound(result)
    assert option.honoured(result)


def test_names_of_the_table_are_those_of_questions() -> None:
    """Else a row would refuse nothing."""
    fields = {one.name for one in dataclasses.fields(PlanOptions)} - {"rules"}
    fields |= {f"rules.{one.name}" for one in dataclasses.fields(RuleOptions)}
    facts = {REMOTE, GRADED, SLOS, DRAFTED, IN_FORCE, AT_ONCE, UNPREDICTED, TOO_MANY, SWEEP}
    for row in TABLE:
        for name in (*row.these, *row.those):
            known = name.partition(": ")[0]
            assert known in facts or known.removeprefix("no ") in fields, name


@pytest.mark.parametrize(
    ("axis", "change", "field"),
    [
        (Axis.RATE, {"goal": Goal.RATE}, "sweep"),
        (Axis.QUALITY, {"goal": Goal.QUALITY}, "sweep"),
        (Axis.RATE, {"gap_s": 0.0}, "sweep"),
    ],
)
def test_a_sweep_is_refused_by_the_table(axis: Axis, change: Change, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plans.sweep(asked(change)[0], axis, [50.0], lambda *_: pytest.fail("it has begun to plan"))
    assert [problem.field for problem in caught.value.problems] == [field]


@pytest.mark.slow
@pytest.mark.parametrize("first", OPTIONS, ids=lambda option: option.name)
def test_every_pair_of_options_is_refused_by_the_table_or_planned(first: Option) -> None:
    wrong = []
    for one, other in (pair for pair in PAIRS if pair[0] is first):
        try:
            result = planned(one.needs | other.needs | one.change | other.change)
        except Exception as error:
            wrong.append(f"{one.name} with {other.name}: {type(error).__name__}: {error}")
            continue
        if not isinstance(result, str):
            honoured = is_sound(result), bool(one.honoured(result)), bool(other.honoured(result))
            if not all(honoured):
                wrong.append(f"{one.name} with {other.name}: {honoured}")
    assert not wrong, "\n".join(wrong)
