"""Tiers behind an API: prices per token, limits and latencies as stated, no GPUs; the cheapest against brute force."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.brute_force import wanted_quality
from penstock.cli.main import app
from penstock.planner_service.codecs.plan_file import read_plan
from penstock.planner_service.deployment.search import Strategy
from penstock.planner_service.manifests.render import mesh_file, planned_tiers
from penstock.planner_service.planning.verdict import verdict
from penstock.planner_service.question.site import Demand, Site, replica_kinds
from penstock.planner_service.replay.slo_classes import WorkloadClass
from penstock.planner_service.replay.slo_simulation import simulate_slos
from penstock.planner_service.replay.sustained_load import sustained_load
from penstock.planner_service.routing.goals import cheapest
from penstock.planner_service.routing.grading import Grading
from penstock.planner_service.routing.mixed_deployer import MixedDeployer
from penstock.planner_service.routing.quality import JudgedSample, route
from penstock.planner_service.routing.solution import Unreachable
from penstock.planner_service.simulator import Workload
from penstock.planner_service.simulator.remote import RemoteTier
from penstock.question_files.errors import FileError
from penstock.services.domain.errors import InvalidRequest
from penstock.types.planning import Objective
from tests.planner.test_gpu_types import Priced, brute_force, typed_instance
from tests.support.hard_prompts import demand_at, plan_arguments
from tests.support.inputs import read_site
from tests.support.plain_plans import plan_cascade
from tests.support.present import present
from tests.support.questions import asked

API: dict[str, Any] = {
    "dollars_per_million_input_tokens": 2.0,
    "dollars_per_million_output_tokens": 8.0,
    "first_token_s": 0.5,
    "token_s": 0.01,
}
TARGETS: dict[str, Any] = {"min_quality": 76.0, "max_latency_s": 12.0}


def site_of(folder: Path, api: dict[str, Any] | None = None, price: float | None = 3.0, **tier: Any) -> Site:
    cluster = {"gpu": "h100", "nodes": 1, "gpus_per_node": 8}
    (folder / "cluster.yaml").write_text(
        yaml.safe_dump(cluster | ({} if price is None else {"dollars_per_gpu_hour": price}))
    )
    large = {"name": "large", "model": "some-api-model", "remote": API if api is None else api} | tier
    (folder / "models.yaml").write_text(yaml.safe_dump({"tiers": [{"name": "small", "model": "qwen2.5-1.5b"}, large]}))
    return read_site(folder / "cluster.yaml", folder / "models.yaml")


def remote_instance(seed: int, grading: Grading | None = None) -> tuple[MixedDeployer, JudgedSample, RemoteTier]:
    """As typed_instance, with an API as the last tier, whose price, latency and limits are drawn."""
    typed, sample = typed_instance(seed)
    rng = np.random.default_rng(seed + 20_000)
    scale = typed._traffic.rate_per_s
    remote = RemoteTier(
        float(rng.uniform(0.1, 1.5)),
        float(rng.uniform(0.001, 0.02)),
        float(rng.uniform(0, 0.2) / 3600 / scale),
        float(rng.uniform(0, 0.6) / 3600 / scale),
        scale * float(rng.choice([0.5, 0.9, np.inf])),
        scale * float(rng.choice([40.0, np.inf])),
    )
    kinds, remotes = [*typed.kinds[:-1], []], (*(None,) * (len(sample.tiers) - 1), remote)
    deployer = MixedDeployer(sample, typed._traffic.arrival_s, kinds, typed.types, remotes=remotes, grading=grading)
    return deployer, sample, remote


def by_api(deployer: MixedDeployer, remote: RemoteTier, work: Workload) -> list[Priced]:
    """What the requests of the last tier cost and take; nothing if they are over its limits."""
    per_s = deployer._traffic.rate_per_s / len(deployer.sample)
    tokens = int((work.input_tokens + work.output_tokens).sum())
    if per_s * len(work) > remote.requests_per_s or per_s * tokens > remote.tokens_per_s:
        return []
    seconds = [remote.first_token_s + remote.token_s * (n - 1) for n in work.output_tokens.tolist()]
    prompts, replies = int(work.input_tokens.sum()), int(work.output_tokens.sum())
    dollars = prompts * remote.dollars_per_input_token + replies * remote.dollars_per_output_token
    latency_s = float(np.percentile(seconds, 95.0)) if seconds else 0.0
    return [((0,) * len(deployer.types.names), dollars * per_s * 3600, latency_s)]


def test_the_cheapest_is_brute_forces() -> None:
    """On 27 small instances: GPUs by their prices and tokens by theirs, within latency and limits."""
    feasible = paid = 0
    for seed in range(27):
        deployer, sample, remote = remote_instance(seed)
        limit_s = float(np.random.default_rng(seed).uniform(0.5, 3.0))
        best, _ = brute_force(deployer, sample, wanted_quality(sample), limit_s, partial(by_api, deployer, remote))
        try:
            solution = cheapest(deployer, wanted_quality(sample), limit_s)
        except Unreachable:
            assert best == np.inf, seed
            continue
        feasible += 1
        tokens = solution.deployment.strategies[-1].remote_dollars_per_hour
        paid += tokens > 0
        assert deployer.cost(solution.deployment) == pytest.approx(best, rel=1e-9), seed
        assert solution.deployment.gpus[-1] == 0
    assert feasible >= 10
    assert paid >= 5


def test_grading_by_an_api_is_paid() -> None:
    """Where the API grades, its tokens are those of its own requests and of the grades."""
    plain, sample, remote = remote_instance(0)
    assert (remote.requests_per_s, remote.tokens_per_s) == (math.inf, math.inf)
    graded, *_ = remote_instance(0, Grading(len(sample.tiers) - 1, 10, 2))
    thresholds = tuple(float(np.median(scores)) for scores in sample.scores.T[:-1])
    costs = [one.cost_within(thresholds, 100.0) for one in (graded, plain)]
    answers = route(sample, thresholds).processed[:-1]
    tokens_in = sum(
        int((sample.input_tokens + sample.output_tokens[:, t] + 10)[rows].sum()) for t, rows in enumerate(answers)
    )
    tokens_out = 2 * int(answers.sum())
    dollars = tokens_in * remote.dollars_per_input_token + tokens_out * remote.dollars_per_output_token
    assert costs[0] - costs[1] == pytest.approx(dollars / len(sample) * graded._traffic.rate_per_s * 3600)


@pytest.mark.parametrize("objective", list(Objective))
def test_a_plan_pays_gpus_and_tokens(tmp_path: Path, objective: Objective) -> None:
    """The cost of a plan is that of its GPUs and of the tokens at the planned rate; an API takes no GPU."""
    site, demand = site_of(tmp_path), demand_at(10.0)
    plan = plan_cascade(site, demand, **TARGETS, objective=objective, max_utilisation=0.75)
    small, large = plan.tiers
    assert small.gpus > 0
    assert large.gpus == 0
    rows = route(demand.requests, plan.thresholds).processed[1]
    requests = demand.requests
    tokens = 2e-6 * requests.input_tokens[rows].sum() + 8e-6 * requests.output_tokens[rows, 1].sum()
    per_hour = tokens / len(requests) * present(demand.rate_per_s) * 3600
    assert large.strategy.remote_dollars_per_hour == pytest.approx(per_hour)
    assert plan.dollars_per_hour == pytest.approx(3.0 * small.gpus + per_hour)
    latency = 0.5 + 0.01 * (requests.output_tokens[rows, 1] - 1)
    assert large.report.latency_s.p95 == pytest.approx(np.percentile(latency, 95))
    assert large.report.ttft_s.p50 == pytest.approx(0.5)
    assert f"{per_hour:,.2f} dollars per hour for tokens of large" in verdict(site, plan)
    scaled = plan_cascade(site, demand.scaled(2.0), **TARGETS, objective=objective, max_utilisation=0.75)
    assert scaled.tiers[1].strategy.remote_dollars_per_hour > per_hour


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
def test_limits_bound_the_share(tmp_path: Path, limit: str) -> None:
    """What is sent to an API stays within the utilisation of its limits; where quality needs more, the rate binds."""
    demand = demand_at(10.0)
    cheap = API | {name: 1e-3 for name in API if name.startswith("dollars")}
    free = plan_cascade(site_of(tmp_path, cheap), demand, **TARGETS, max_utilisation=0.75)
    rows = route(demand.requests, free.thresholds).processed[1]
    tokens = (demand.requests.input_tokens + demand.requests.output_tokens[:, 1])[rows].mean()
    per_request = 1.0 if limit.startswith("requests") else float(tokens)
    used = 60 * present(demand.rate_per_s) * free.tiers[1].share_processed * per_request
    tight = site_of(tmp_path, cheap | {limit: used * 1.1})
    bounded = plan_cascade(tight, demand, **TARGETS, max_utilisation=0.75)
    assert bounded.tiers[1].share_processed < free.tiers[1].share_processed
    assert bounded.utilisation[1] <= 0.75 + 1e-9
    strategies = [bounded.tiers[0].strategy, free.tiers[1].strategy]
    processed = route(demand.requests, bounded.thresholds).processed
    load = present(sustained_load(demand.requests, demand.arrival_s, processed, strategies))
    assert load.tier == "small", "without limits an API does not break"
    with pytest.raises(Unreachable):
        plan_cascade(site_of(tmp_path, cheap | {limit: used * 0.01}), demand, **TARGETS, max_utilisation=0.75)


def test_an_api_alone_has_no_rate_at_which_it_breaks() -> None:
    demand = demand_at(10.0)
    strategies = [Strategy((), 0.0), Strategy((), 1.0, RemoteTier(0.5, 0.01, 1e-6, 1e-6))]
    processed = route(demand.requests, (101.0,)).processed
    assert sustained_load(demand.requests, demand.arrival_s, processed, strategies) is None


def test_a_remote_tier_in_virtual_time() -> None:
    """First and last tokens are as stated, whatever the load."""
    work = Workload(np.array([0.0, 0.0, 5.0]), np.array([10, 10, 10]), np.array([1, 11, 101]))
    served = RemoteTier(0.5, 0.01, 0.0, 0.0).serve(work)
    assert served.first_s.tolist() == [0.5, 0.5, 5.5]
    assert served.finish_s.tolist() == pytest.approx([0.5, 0.6, 6.5])
    limited = RemoteTier(0.5, 0.01, 0.0, 0.0, 10.0, 90.0)
    assert limited.sustained_per_s(work) == pytest.approx(90.0 * 3 / 143)


@pytest.mark.parametrize(
    ("api", "tier", "problem"),
    [
        (API | {"first_token_s": 0}, {}, "remote.first_token_s"),
        (API | {"token_s": -1}, {}, "remote.token_s"),
        (API | {"dollars_per_million_input_tokens": -1}, {}, "remote.dollars_per_million_input_tokens"),
        (API | {"dollars_per_million_output_tokens": float("inf")}, {}, "remote.dollars_per_million_output_tokens"),
        (API | {"requests_per_minute": 0}, {}, "remote.requests_per_minute"),
        ({"first_token_s": 1}, {}, "remote.token_s"),
        (
            API,
            {"speculation": {"drafters": [{"model": "qwen2.5-0.5b", "acceptance": 0.5}]}},
            "remote: not with profiles or speculation",
        ),
        (
            API,
            {"model": {"layers": 1, "hidden": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "parameters": 1}},
            "model: must be a name for a remote tier",
        ),
    ],
)
def test_bad_remote_tiers_are_refused(tmp_path: Path, api: dict[str, Any], tier: dict[str, Any], problem: str) -> None:
    with pytest.raises((FileError, InvalidRequest)) as caught:
        site_of(tmp_path, api, **tier)
    assert problem in str(caught.value)


def test_tokens_need_prices_of_gpus(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="remote: the cluster needs dollars_per_gpu_hour"):
        site_of(tmp_path, price=None)


def test_what_does_not_go_with_an_api_is_refused(tmp_path: Path) -> None:
    site, demand = site_of(tmp_path), demand_at(5.0, 40)
    strategies = [Strategy((), 0.0), Strategy((), 0.0, site.remote_of(1))]
    with pytest.raises(InvalidRequest, match="remote: tiers are not simulated with SLOs"):
        simulate_slos(site, demand, (101.0,), strategies, [WorkloadClass("chat", 2.0, 0.1, 1.0)], 1)
    assert replica_kinds(site, 1, 8, 100) == ([], "large is remote: it takes no GPUs")
    with pytest.raises(InvalidRequest, match="render: large is remote"):
        mesh_file(site, [{"workers": 1}, {"workers": 1}])
    at_once = Demand(demand.judged, demand.requests, np.zeros(40))
    with pytest.raises(InvalidRequest, match="trace: the arrivals come all at once"):
        plan_cascade(site, at_once, min_quality=76.0)


def test_plans_show_apis(tmp_path: Path) -> None:
    """In the table, in the JSON, in the message and in the SDK; a plan file is replayed with them and has one worker."""
    site_of(tmp_path)
    options = ("--min-quality", "76", "--max-latency", "12", *asked(requests=150, runs=1))
    out = tmp_path / "plan.json"
    done = CliRunner().invoke(
        app, ["plan", *plan_arguments(tmp_path, demand_at(10.0)), *options, "--out", str(out), "--plot"]
    )
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    small, large = written["tiers"]
    assert small["remote"] is None
    assert large["remote"]["dollars_per_hour"] > 0
    assert (large["gpus"], large["replicas"]) == (0, [])
    plan = read_plan(out).plan
    first, last = plan.tiers
    assert present(first.threshold) > 0.0
    assert planned_tiers(plan) == [{"workers": first.instances, "threshold": first.threshold}, {"workers": 1}]
    assert (first.instances, last.instances) == (sum(group["count"] for group in small["replicas"]), 1)
    assert written["cost"]["dollars_per_hour"] == pytest.approx(
        3.0 * small["gpus"] + large["remote"]["dollars_per_hour"]
    )
    words = " ".join(done.output.split())
    assert "tokens of large" in words
    assert "remote" in words
    replay = ["simulate", "--plan", str(out), "--trace", str(tmp_path / "trace.csv"), "--json"]
    replayed = CliRunner().invoke(app, replay)
    assert replayed.exit_code == 0, replayed.output
    assert json.loads(replayed.stdout)["tiers"][1]["requests"] > 0
    assert first.remote is None
    assert last.remote is not None
    assert last.used
