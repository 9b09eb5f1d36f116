"""Rejected answers as drafts of later tiers: what plans count on, and that simulation counts it as well."""

import dataclasses

import numpy as np
import pytest

from penstock.planner_service.api import plans
from penstock.planner_service.manifests.render import groups, mesh_file
from penstock.planner_service.question.site import ONE_GPU, replica_kinds
from penstock.planner_service.replay.cascade_simulation import run_cascade
from penstock.planner_service.routing.deployer import Deployer
from penstock.planner_service.routing.quality import SKIPPED, JudgedSample, route
from penstock.services.acceptance.judged import GivenDrafts
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.hardware import ReplicaShape
from penstock.types.planning import Model, PlanningQuestion, RemoteApi
from tests.support.questions import question, site_and_demand

ACCEPTANCE = (0.8, 0.8, 0.9)
ON_ONE_GPU = ("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b")


def drafted(**options: object) -> PlanningQuestion:
    asked = question(**options)
    tiers = [
        dataclasses.replace(tier, model=Model(model), draft_acceptance=share)
        for tier, model, share in zip(asked.models.tiers, ON_ONE_GPU, ACCEPTANCE, strict=True)
    ]
    return dataclasses.replace(asked, models=dataclasses.replace(asked.models, tiers=tuple(tiers)))


def test_a_pass_verifies_as_many_tokens_as_pay() -> None:
    """More of them where they are accepted more often; none where wrong ones cost more than right ones save."""
    asked = drafted()
    windows = []
    for share in (0.05, 0.6, 1.0):
        tiers = tuple(dataclasses.replace(tier, draft_acceptance=share) for tier in asked.models.tiers)
        _, demand = site_and_demand(dataclasses.replace(asked, models=dataclasses.replace(asked.models, tiers=tiers)))
        windows.append([given.window for given in demand.judged.drafts])
    assert windows[0] == [0, 0, 0]
    assert windows[1][2] > 0
    assert windows[2] > windows[1]
    assert not site_and_demand(question())[1].judged.drafts


def test_only_requests_with_a_rejected_answer_have_a_draft_as_long_as_it_is() -> None:
    """A draft is the answer of the last tier that a request visited; tokens beyond its end take a pass each."""
    outputs = np.array([[10, 7, 31], [100, 7, 31], [100, 200, 31]])
    sample = JudgedSample(
        ("small", "medium", "large"),
        np.array([5, 6, 7]),
        outputs,
        np.array([[100.0, 100, 100], [0, 100, 100], [0, 0, 100]]),
        drafts=(GivenDrafts(0.0, 0), GivenDrafts(0.5, 1), GivenDrafts(0.5, 1)),
    )
    through = route(sample, (50.0, 50.0)).processed
    assert sample.draft_tokens(0, through).tolist() == [0, 0, 0]
    assert sample.draft_tokens(1, through).tolist() == [0, 100, 100]
    assert sample.draft_tokens(2, through).tolist() == [0, 0, 200]
    assert sample.draft_tokens(2, route(sample, (SKIPPED, 50.0)).processed).tolist() == [0, 0, 200]
    assert not sample.draft_tokens(2, route(sample, (SKIPPED, SKIPPED)).processed).any()
    rows = np.arange(3)
    inputs, passes = sample.lengths(2, rows, np.array([0, 10, 200]))
    assert passes.tolist() == [31, 21 + 7, 21]  # of 10 drafted tokens, 7 passes of 1.5 each
    assert inputs.tolist() == [5, 6 + 7, 7 + 21]
    only = sample.only((1, 2))
    assert only.draft_tokens(1, route(only, (50.0,)).processed).tolist() == [0, 0, 200]


def test_drafts_take_less_gpu_time_and_what_is_planned_is_what_is_simulated() -> None:
    """What the deployer expects of each tier is what a simulation of the whole cascade shows where requests wait for no
    others; no request is faster than its bound, and first tiers have no drafts."""
    site, demand = site_and_demand(drafted())
    longest = int((demand.judged.input_tokens[:, None] + 3 * demand.judged.output_tokens).max())
    kinds = [replica_kinds(site, tier, 24, longest)[0] for tier in range(3)]
    apart = dataclasses.replace(demand, arrival_s=np.linspace(0.0, 1e5, len(demand.requests)))
    deployer = Deployer(apart.requests, apart.arrival_s, kinds, 24)
    thresholds = (80.0, 90.0)
    deployment = deployer.deploy(thresholds)
    assert deployment is not None
    planned_s, bounds_s = deployer.times_s(thresholds, deployment.strategies)[0], deployer.alone_s()
    run = run_cascade(
        dataclasses.replace(site, judge_s=0.0), apart, thresholds, deployment.strategies, deployer.dispatch
    )
    assert run.total_s == pytest.approx(planned_s.sum(axis=0))
    processed = route(apart.requests, thresholds).processed
    assert (planned_s >= bounds_s * (1 - 1e-9))[processed].all()
    without = dataclasses.replace(apart.requests, drafts=())
    undrafted = Deployer(without, apart.arrival_s, kinds, 24)
    undrafted_s = undrafted.times_s(thresholds, deployment.strategies)[0]
    assert planned_s[0] == pytest.approx(undrafted_s[0])
    assert (planned_s[1:] < undrafted_s[1:])[processed[1:]].mean() > 0.9
    assert deployer.gpu_s(thresholds) < undrafted.gpu_s(thresholds)
    assert deployer.gpu_s((0.0, 0.0)) == undrafted.gpu_s((0.0, 0.0))


def test_tiers_with_drafts_run_on_one_gpu_by_an_engine_that_takes_them() -> None:
    """SGLang's servers take none. Neither do replicas over several GPUs; a tier without drafts may have these."""
    site, _ = site_and_demand(drafted())
    assert site.replica(0, ReplicaShape(2, 1), 1000)[0] is not None
    assert site.replica(2, ReplicaShape(2, 1), 1000) == (None, f"large has drafts: {ONE_GPU}, not TP=2")
    two = site.only([2]).replica(0, ReplicaShape(2, 1), 1000)[0]
    assert two is not None  # nothing escalates to it
    measured = dataclasses.replace(site, measured=((), (), (two,)))
    assert measured.replica(2, two.shape, 1000) == (None, f"large has drafts: {ONE_GPU}, not TP=2")
    on_one = [[(ReplicaShape(1, 1), 1)]] * 3
    assert [group.drafts for group in groups(site, on_one)] == [False, True, True]
    tiers = mesh_file(site, [{"workers": 1}] * 3)["tiers"]
    assert [tier["engine"] for tier in tiers] == ["sglang", "torch", "torch"]
    assert "speculation" not in tiers[2]


def test_drafts_that_cannot_be_are_named() -> None:
    asked = drafted()
    remote = dataclasses.replace(asked.models.tiers[2], model=Model("api"), remote=RemoteApi(1.0, 1.0, 0.1, 0.01))
    tiers = (*asked.models.tiers[:2], remote)
    for changed, field in (
        (tiers, r"models\.tiers\[2\]\.draft_acceptance"),
        ((dataclasses.replace(tiers[0], draft_acceptance=1.5), *tiers[1:]), r"models\.tiers\[0\]\.draft_acceptance"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            plans.plan(dataclasses.replace(asked, models=dataclasses.replace(asked.models, tiers=changed)))
