"""Rules for long answers where they are planned: routing under a rule, plans, files, the service's calls, errors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.client.messages import planning
from penstock.client.plans import LongAnswers as ClientRule
from penstock.client.plans import PlanningInputs, ReplicaGroup
from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service import planning_codec as codec
from planner_service.cascade_simulation import run_cascade
from planner_service.demand import draw_demand
from planner_service.files import FileError, gpu_of_catalogue, model_of_catalogue, read_quality
from planner_service.long_answer_search import candidates, rules_tried
from planner_service.plan_cascade import plan_cascade
from planner_service.plan_file import read_plan
from planner_service.routing.quality import JudgedSample, all_qualities, route
from planner_service.routing.rules import RoutingRules
from planner_service.routing.solution import Proof
from planner_service.simulator import Dispatch
from planner_service.simulator.felt import Objective
from planner_service.site import Demand, Site
from router_service.generation import cascade
from services.domain import Plan, TierPlan
from services.domain.errors import InvalidRequest
from services.domain.hardware import ClusterSpec
from services.domain.long_answers import LongAnswers
from tests.conftest import ROOT
from tests.support.cli import penstock
from tests.support.two_tiers import two_tier_files, two_tier_inputs

TIERS = ("small", "medium", "large")


def sample(seed: int, count: int = 80) -> JudgedSample:
    """Random scores, few of them distinct, so that many are just at a threshold."""
    rng = np.random.default_rng(seed)
    scores = np.asarray(rng.integers(0, 6, (count, 3)) * 20.0, np.float64)
    return JudgedSample(TIERS, rng.integers(1, 50, count), rng.integers(1, 90, (count, 3)), scores)


def random_rules(rng: np.random.Generator) -> tuple[LongAnswers | None, ...]:
    def rule() -> LongAnswers | None:
        return None if rng.random() < 0.2 else LongAnswers(int(rng.integers(1, 90)), float(rng.choice([0, 20, 40, 80])))

    return rule(), rule()


@pytest.mark.parametrize("seed", range(20))
def test_routing_under_a_rule_is_what_a_router_does(seed: int) -> None:
    """One prompt after another by the router's own decision, against the arrays; and the grid of all thresholds."""
    judged, rng = sample(seed), np.random.default_rng(seed + 100)
    rules = random_rules(rng)
    accepting = judged.accepting(rules)
    thresholds = (float(rng.choice([0, 40, 100])), float(rng.choice([20, 60, 100])))
    tiers = (*(TierPlan(n, n, h, 1, long_answers=r) for n, h, r in zip(TIERS, thresholds, rules, strict=False)),)
    plan = Plan(1, (*tiers, TierPlan("large", "large", None, 1)))
    routed = route(accepting, thresholds)
    for i in range(len(judged)):
        at = 0
        while isinstance(
            decision := cascade.decide(
                plan, plan.tiers, at, float(judged.scores[i, at]), counted_tokens=int(judged.output_tokens[i, at])
            ),
            cascade.Escalate,
        ):
            at = decision.to
        assert routed.answered[i] == at
        assert routed.processed[:, i].sum() == at + 1
    levels, qualities = all_qualities(accepting)
    for a, b in rng.integers(0, [len(level) for level in levels], (20, 2)):
        assert qualities[a, b] == pytest.approx(route(accepting, (levels[0][a], levels[1][b])).quality)


def test_a_tier_that_is_passed_over_accepts_no_long_answers() -> None:
    judged = sample(3).accepting((LongAnswers(1, 0.0), None))
    assert not route(judged, (101.0, 60.0)).processed[0].any()
    assert route(judged, (100.0, 60.0)).answered.max() == 0


def test_what_a_guard_has_refused_is_no_long_answer() -> None:
    """As in the router: an answer that was cut off or repeats itself is long for that reason."""
    judged = sample(6)
    refused = (judged.scores == 0) & (np.arange(len(judged))[:, None] % 2 == 0)
    with_reasons = dataclasses.replace(judged, refused=refused).accepting((LongAnswers(1, 0.0), LongAnswers(1, 0.0)))
    assert with_reasons.long_enough is not None
    assert not with_reasons.long_enough[refused].any()
    assert with_reasons.long_enough[:, :2][~refused[:, :2]].all()
    rows = np.array([0, 5, 7])
    np.testing.assert_array_equal(with_reasons.subset(rows).refused, refused[rows])
    np.testing.assert_array_equal(with_reasons.only((0, 2)).refused, refused[:, [0, 2]])


def test_refusals_come_from_files_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "judged.csv"
    header = "input_tokens,a_output_tokens,a_judge_score,b_output_tokens,b_judge_score,a_refused,b_refused"
    path.write_text(f"{header}\n5,9,0,9,80,1,0\n5,9,0,9,90,0,0\n")
    np.testing.assert_array_equal(read_quality(path, ("a", "b")).refused, [[True, False], [False, False]])
    path.write_text(f"{header}\n5,9,0,9,80,2,0\n")
    with pytest.raises(FileError, match="a_refused"):
        read_quality(path, ("a", "b"))
    request = planning.plan_request(inputs(), 75.0, None, "end-to-end", None, None, "at-most").inputs
    assert codec.inputs_from_proto(request)[1].judged.refused is None
    for i, prompt in enumerate(request.workload.judged):
        prompt.refused.extend([i == 3, False])
    refused = codec.inputs_from_proto(request)[1].judged.refused
    assert refused is not None
    assert np.argwhere(refused).tolist() == [[3, 0]]


def test_parts_of_a_sample_keep_their_rules() -> None:
    judged = sample(4).accepting((LongAnswers(40, 20.0), LongAnswers(60, 0.0)))
    rows = np.array([3, 1, 60])
    assert judged.long_enough is not None
    np.testing.assert_array_equal(judged.subset(rows).long_enough, judged.long_enough[rows])
    np.testing.assert_array_equal(judged.only((0, 2)).long_enough, judged.long_enough[:, [0, 2]])
    assert judged.accepting((None, None)).long_enough is None
    with pytest.raises(InvalidRequest, match="long_answers"):
        judged.accepting((None,))


def long_answers_are_slow(seed: int, count: int = 400) -> tuple[Site, Demand]:
    """Two tiers whose answers are long for the same prompts, with scores that do not depend on length."""
    rng = np.random.default_rng(seed)
    length = rng.choice([40, 60, 900], count, p=[0.4, 0.4, 0.2])
    tokens = np.stack([length, length], axis=1)
    scores = np.stack([rng.integers(0, 101, count), np.full(count, 95)], axis=1).astype(np.float64)
    judged = JudgedSample(("small", "large"), rng.integers(20, 60, count), tokens, scores)
    cluster = ClusterSpec(gpu_of_catalogue("a100-80gb"), nodes=1, gpus_per_node=4, node_link_bytes_per_s=25e9)
    site = Site(cluster, ("small", "large"), tuple(map(model_of_catalogue, ("llama-3.1-8b", "llama-3.1-70b"))))
    arrival_s = np.cumsum(rng.exponential(0.2, count))
    return site, draw_demand(judged, arrival_s, seed)


@pytest.mark.parametrize("objective", [Objective.END_TO_END, Objective.LARGEST_TIER])
def test_a_plan_with_a_rule_is_faster_at_the_same_quality(objective: Objective) -> None:
    """Where long answers escalate last, the slowest twentieth of requests is served by one tier. Replayed whole."""
    site, demand = long_answers_are_slow(1)
    plain = plan_cascade(site, demand, min_quality=75, objective=objective)
    plan = plan_cascade(site, demand, min_quality=75, objective=objective, long_answers=True)
    assert plain.long_answers == ()
    (rule,) = plan.long_answers
    assert rule is not None
    assert plan.quality >= 75
    assert plan.felt_s < 0.9 * plain.felt_s
    assert (plan.solution.proof, plan.solution.gap) == (Proof.SEARCHED, None)
    under = demand.under(plan.rules)
    assert route(under.judged, plan.thresholds).quality == plan.quality
    run = run_cascade(site, under, plan.thresholds, [t.strategy for t in plan.tiers], Dispatch.CAPACITY)
    if objective is Objective.END_TO_END:
        assert run.latency_s(objective, 95.0) == plan.felt_s


def test_length_that_tells_nothing_changes_nothing() -> None:
    """Answers of one length: a rule for all of them or for none is what thresholds do already."""
    site, demand = long_answers_are_slow(2)
    alike = dataclasses.replace(demand.judged, output_tokens=np.full_like(demand.judged.output_tokens, 60))
    demand = draw_demand(alike, demand.arrival_s, 2)
    plain = plan_cascade(site, demand, min_quality=75)
    plan = plan_cascade(site, demand, min_quality=75, long_answers=True)
    assert plan.felt_s <= plain.felt_s
    if plan.long_answers == (None,):
        assert (plan.thresholds, plan.felt_s) == (plain.thresholds, plain.felt_s)


def test_a_promise_holds_for_the_plan_that_is_taken() -> None:
    """Each of the plans is tested at a share of the error: the plan is no slower than the one without a rule, tested so."""
    site, demand = long_answers_are_slow(3)
    plan = plan_cascade(site, demand, min_quality=75, confidence=0.9, long_answers=True)
    plain = plan_cascade(site, demand, min_quality=75, confidence=1 - 0.1 / rules_tried(2))
    assert plan.promise is not None
    assert plain.promise is not None
    assert plan.promise.confidence == 0.9
    assert plan.felt_s <= plain.felt_s


def test_rules_that_are_tried() -> None:
    """At most as many as the error of a promise is shared out to, and each tells some answers from others."""
    judged = sample(5)
    for tier, rules in enumerate(candidates(judged)):
        assert 1 <= len(rules) <= (rules_tried(3) - 1) / 2
        for rule in rules:
            long = judged.output_tokens[:, tier] >= rule.from_tokens
            assert 0 < long.sum() < len(judged)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return two_tier_files(tmp_path_factory.mktemp("files"), long_answers_are_slow(1)[1], 200)


def planned(files: dict[str, Path], out: Path) -> Any:
    cluster = ROOT / "examples/cluster-1x8-h100.yaml"
    site = ("--cluster", cluster, "--models", files["models"], "--gpus", 4)
    work = ("--trace", files["trace"], "--quality", files["judged"], "--requests", 200, "--runs", 0)
    return penstock("plan", *site, *work, "--min-quality", 75, "--long-answers", "--no-plot", "--out", out)


def test_a_plan_file_has_the_rule_and_is_replayed_and_rendered_with_it(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = planned(files, out)
    assert result.returncode == 0, result.output
    figures = json.loads(out.read_text())
    (rule,) = figures["long_answers"]
    assert (
        f"long answers accepted: small of {rule['from_tokens']} tokens from score {rule['threshold']:g}"
        in result.output
    )
    read = read_plan(out)
    assert read.long_answers == (LongAnswers(**rule),)
    replayed = penstock("simulate", "--plan", out, "--trace", files["trace"], "--requests", 200, "--json")
    assert replayed.returncode == 0, replayed.output
    p95_s = json.loads(replayed.stdout)["end_to_end_s"]["p95"]
    without = figures | {"long_answers": None}
    out.write_text(json.dumps(without))
    plain = json.loads(
        penstock("simulate", "--plan", out, "--trace", files["trace"], "--requests", 200, "--json").stdout
    )
    assert p95_s < plain["end_to_end_s"]["p95"]
    out.write_text(json.dumps(figures))
    refused = penstock("simulate", "--plan", out, "--trace", files["trace"], "--requests", 200, "--lengths", "trace")
    assert refused.returncode == 2
    assert "--lengths trace goes without --long-answers" in refused.output
    assert penstock("plan", "render", out, "--to", "compose").returncode == 0
    mesh = yaml.safe_load(out.with_suffix(".mesh.yaml").read_text())
    assert [tier.get("long_answers") for tier in mesh["tiers"]] == [rule, None]
    for wrong, field in (
        ([rule, rule], "long_answers: must be of 1 tiers"),
        ([rule | {"from_tokens": 0}], r"long_answers\[0\].from_tokens"),
        ([rule | {"threshold": 101}], r"long_answers\[0\].threshold"),
        ([rule | {"from_tokens": 2**40}], r"long_answers\[0\].from_tokens"),
        ([rule | {"from_tokens": 3.5}], r"long_answers\[0\].from_tokens: must be a whole number"),
        ([{"from_tokens": 3}], "threshold"),
    ):
        out.write_text(json.dumps(figures | {"long_answers": wrong}))
        with pytest.raises(FileError, match=field):
            read_plan(out)


def inputs() -> PlanningInputs:
    return two_tier_inputs(long_answers_are_slow(1, 120)[1], 200)


def test_the_service_plans_and_simulates_with_the_rule() -> None:
    """`PlanCascade` answers with the library's rule; `SimulateDeployment` of it has the plan's p95. Bad rules are named."""
    request = planning.plan_request(inputs(), 75.0, None, "end-to-end", None, None, "at-most", long_answers=True)
    site, demand = codec.inputs_from_proto(request.inputs)
    plan = plan_cascade(site, demand, codec.options_from_proto(request))
    message = codec.plan_to_proto(plan, site, demand, 0.0)
    (rule,) = plan.long_answers
    assert rule is not None
    assert [t.HasField("long_answers") for t in message.tiers] == [True, False]
    response = pb.PlanCascadeResponse(finished=pb.PlanFinished(plan=message))
    read: Any = planning.plan_event_from_proto(response)
    client_rule = ClientRule(rule.from_tokens, rule.threshold)
    assert [tier.long_answers for tier in read.tiers] == [client_rule, None]
    groups = [[ReplicaGroup(g.tp, g.pp, g.count) for g in t.replicas] for t in message.tiers]
    simulated = planning.simulate_request(inputs(), groups, [plan.thresholds[0]], long_answers=[client_rule])
    rules = codec.rules_from_proto(simulated, site, demand)
    assert rules == RoutingRules((None,), (rule,), ())
    strategies = [tier.strategy for tier in plan.tiers]
    replayed = run_cascade(site, demand.under(rules), plan.thresholds, strategies, Dispatch.CAPACITY)
    assert replayed.latency_s(Objective.END_TO_END, 95.0) == plan.felt_s
    for tier, tokens, threshold, field in (
        (0, 0, 10.0, "tiers[0].long_answers.from_tokens"),
        (0, 5, 101.0, "tiers[0].long_answers.threshold"),
        (0, 5, float("nan"), "tiers[0].long_answers.threshold"),
        (1, 5, 10.0, "tiers[1].long_answers"),
    ):
        bad = pb.SimulateDeploymentRequest()
        bad.CopyFrom(simulated)
        bad.tiers[tier].long_answers.from_tokens, bad.tiers[tier].long_answers.threshold = tokens, threshold
        with pytest.raises(InvalidRequest) as refused:
            codec.rules_from_proto(bad, site, demand)
        assert [problem.field for problem in refused.value.problems] == [field]
    simulated.inputs.workload.lengths = request.inputs.workload.lengths = pb.LENGTH_SOURCE_TRACE
    for refusing in (
        lambda: codec.rules_from_proto(simulated, site, demand),
        lambda: codec.options_from_proto(request),
    ):
        with pytest.raises(InvalidRequest) as refused:
            refusing()
        assert [problem.field for problem in refused.value.problems] == ["inputs.workload.lengths"]
    placed = planning.simulate_request(inputs(), groups, [70.0], dispatch="pending-work")
    assert codec.dispatch_from_proto(placed.dispatch) is Dispatch.PENDING_WORK
    with pytest.raises(ValueError, match="dispatch: must be capacity, round-robin, pending-work, not 'random'"):
        planning.simulate_request(inputs(), groups, [70.0], dispatch="random")
    with pytest.raises(ValueError, match="long_answers: must have one entry"):
        planning.simulate_request(inputs(), groups, [70.0], long_answers=[client_rule, None])
