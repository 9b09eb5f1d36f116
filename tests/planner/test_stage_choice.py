"""PlanStages and planning again choose stages as `penstock stages` does: by replay, within bounds, against what serves."""

from typing import Any

import numpy as np
import pytest

import penstock.planner_service.stages.replay as stage_replay
from penstock.mapper import to_message
from penstock.planner_service.codecs import proto_codec
from penstock.planner_service.codecs.proto_codec import completed
from penstock.planner_service.files.measured import measured_of, trace_of
from penstock.planner_service.live import solver
from penstock.planner_service.live.replanner import with_verdict
from penstock.planner_service.live.solver_pool import SolverPool, SolverTimedOut
from penstock.planner_service.simulator import Replica, Workload
from penstock.planner_service.stages import choice
from penstock.planner_service.stages.choice import choose
from penstock.proto.planner.v1 import planner_pb2 as pb
from penstock.services.domain.errors import InvalidRequest
from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.stages.layout import StageLayout
from penstock.types.plans import Plan, QoeModel, Stage, TierPlan
from tests.planner.test_stage_replay import FAST, INSTANCES, QOE, replica, workload
from tests.support.present import present

MAX_TOKENS = 6000


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less precise sustained rates, in less time."""
    monkeypatch.setattr(stage_replay, "SUSTAINED_REQUESTS", (400, 800))


def mixed(requests: int = 300) -> Workload:
    return workload(requests, 14.0)


def alike() -> Workload:
    return Workload(np.arange(300) / 20.0, np.full(300, 100), np.full(300, 100))


def request(work: Workload, one: Replica, **fields: Any) -> pb.PlanStagesRequest:
    message = pb.PlanStagesRequest(
        tier="small",
        instance_count=INSTANCES,
        qoe=to_message(QOE, pb.QoeModel),
        kv_bytes_per_token=1e5,
        bandwidth_bytes_per_second=1e12,
        max_tokens=MAX_TOKENS,
        trace=to_message(trace_of(work), pb.Trace),
        replica=to_message(measured_of(one), pb.MeasuredReplica),
    )
    message.MergeFrom(pb.PlanStagesRequest(**fields))
    return message


def solved(message: pb.PlanStagesRequest) -> pb.PlanStagesResponse:
    """What the solver answers, in this process."""
    responses = list[Any]()
    solver.stages(message.SerializeToString(), responses.append)
    (response,) = responses
    assert isinstance(response, pb.PlanStagesResponse)
    return response


@pytest.mark.slow
def test_the_solver_answers_what_the_command_would() -> None:
    """One choice behind both: the same layout and the same changes."""
    work, slow = mixed(), replica(gap_s=5e-7)
    verdict = choose(work, slow, FAST, QOE, INSTANCES, MAX_TOKENS)
    response = solved(request(work, slow))
    assert verdict.use_stages
    assert response.verdict.use_stages
    assert proto_codec.stages_from_proto(response.stages) == present(verdict.layout).stages
    assert response.verdict.sentence == verdict.sentence
    for name in ("ttft_p50_change", "ttft_p95_change", "tpot_change", "sustained_rate_change"):
        assert getattr(response.verdict, name) == getattr(verdict.changes, name)
    assert proto_codec.qoe_from_proto(response.qoe) == QOE


@pytest.mark.slow
def test_what_serves_stays_unless_the_change_pays() -> None:
    """Stages that the replay favours stay when they serve already; stages that cost more than they bring go."""
    work, slow = mixed(), replica(gap_s=5e-7)
    chosen = present(choose(work, slow, FAST, QOE, INSTANCES, MAX_TOKENS).chosen)
    again = choose(work, slow, FAST, QOE, INSTANCES, MAX_TOKENS, against=chosen)
    assert not again.favoured
    assert again.chosen == chosen
    assert again.sentence.startswith(f"Keep {len(chosen.stages)} stages")
    harmful = StageLayout((Stage(0, 4000, 1), Stage(4000, MAX_TOKENS, 3)))
    response = solved(request(alike(), replica(), against=[to_message(each, pb.Stage) for each in harmful.stages]))
    assert (response.verdict.favoured, response.verdict.use_stages) == (True, False)
    assert [stage.instances for stage in response.stages] == [INSTANCES]
    assert response.verdict.sentence.startswith("Use one stage: replayed against 2 stages")


def test_one_stage_is_the_answer_where_nothing_is_gained_and_a_model_is_fitted_where_there_is_none() -> None:
    message = request(alike(), replica())
    message.ClearField("qoe")
    response = solved(message)
    assert not response.verdict.use_stages
    assert [stage.instances for stage in response.stages] == [INSTANCES]
    assert response.quality == response.one_stage_quality
    assert proto_codec.qoe_from_proto(response.qoe).batch_s > 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 4000}, "max_tokens"),
        ({"instance_count": choice.MAX_INSTANCES + 1}, "instance_count"),
        ({"replica": pb.MeasuredReplica(kv_tokens=2000)}, "replica.kv_tokens"),
        ({"replica": pb.MeasuredReplica(kv_tokens=choice.MAX_KV_TOKENS + 160)}, "replica.kv_tokens"),
        ({"kv_bytes_per_token": float("nan")}, "kv_bytes_per_token"),
        ({"bandwidth_bytes_per_second": float("nan")}, "bandwidth_bytes_per_second"),
        ({"against": [pb.Stage(from_tokens=0, to_tokens=MAX_TOKENS, instances=3)]}, "against"),
        ({"against": [pb.Stage(from_tokens=5, to_tokens=MAX_TOKENS, instances=4)]}, r"against\[0\]\.from_tokens"),
    ],
)
def test_a_field_that_is_unsound_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        solved(request(mixed(50), replica(), **fields))


@pytest.mark.parametrize(
    ("arrival_s", "tokens", "field"),
    [
        (np.array([0.0, 1e12]), 100, "trace.arrival_s: the last 2 arrivals"),
        (np.zeros(3), 100, "trace.arrival_s: have no rate"),
        (np.arange(choice.MAX_REQUESTS + 1) / 100, 1, f"trace.arrival_s: at most {choice.MAX_REQUESTS} requests"),
        (np.arange(3000) / 100, 110_000, "trace: the last 3000 requests"),
    ],
)
def test_a_trace_that_would_take_too_long_is_refused(arrival_s: Any, tokens: int, field: str) -> None:
    """Before anything is replayed: at once."""
    counts = np.full(len(arrival_s), tokens)
    message = request(Workload(arrival_s, counts, np.ones_like(counts)), replica())
    with pytest.raises(InvalidRequest, match=field):
        solved(message)


def test_a_step_takes_time() -> None:
    message = request(mixed(50), replica())
    message.replica.knot_s[:] = [0.0, 0.0]
    with pytest.raises(InvalidRequest, match=r"replica\.knot_s"):
        solved(message)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"publish": True}, "trace: missing: only a layout that a replay favours"),
        ({"replica": pb.MeasuredReplica(tp=1)}, "trace: missing"),
        ({"trace": pb.Trace(arrival_s=[1.0])}, "replica: missing"),
        ({"against": [pb.Stage(to_tokens=5, instances=4)]}, "trace: missing: without a replay"),
    ],
)
def test_what_a_replay_needs_is_named_where_it_is_missing(fields: dict[str, Any], field: str) -> None:
    tier = TierPlan("small", "s", None, INSTANCES, (), QOE)
    with pytest.raises(InvalidRequest, match=field):
        proto_codec.completed(pb.PlanStagesRequest(tier="small", **fields), tier, [])


def planned(stages: tuple[Stage, ...]) -> Plan:
    tier = TierPlan("small", "s", None, INSTANCES, stages, QOE)
    return Plan(1, (tier,), source="drift", note="requests per second")


def test_planning_again_changes_stages_only_where_that_pays_and_says_so() -> None:
    stages = (Stage(0, 300, 3), Stage(300, MAX_TOKENS, 1))
    plan = planned(stages)
    kept = pb.PlanStagesResponse(
        stages=[to_message(each, pb.Stage) for each in stages],
        verdict=pb.StagesVerdict(use_stages=True, sentence="Keep 2 stages."),
    )
    assert with_verdict(plan, plan.tiers[0], kept) == plan
    other = (Stage(0, 200, 2), Stage(200, MAX_TOKENS, 2))
    better = pb.PlanStagesResponse(
        stages=[to_message(each, pb.Stage) for each in other],
        qoe=to_message(QOE, pb.QoeModel),
        verdict=pb.StagesVerdict(use_stages=True, favoured=True, sentence="Use 2 stages."),
    )
    changed = with_verdict(plan, plan.tiers[0], better)
    assert changed.tiers[0].stages == other
    assert changed.note == "requests per second; small: Use 2 stages."


async def test_a_choice_that_takes_too_long_is_ended() -> None:
    """Its process is gone when the caller hears of it."""
    pool = SolverPool(1)
    with pytest.raises(SolverTimedOut, match=r"more than 0\.2 s"):
        await pool.once("PlanStages", request(mixed(), replica()).SerializeToString(), 0.2)
    assert not pool.pids


TIER = TierPlan("only", "m", None, 3, (), QoeModel(1e-3, 0.0, 0.0, 0.0, 1e-6))


def workers(*bytes_per_s: float) -> list[InstanceRecord]:
    card = ModelCard("only", "m", "d", "torch", 1000, 100, 16, 8, kv_bytes_per_token=114_688.0)
    return [
        InstanceRecord(f"w{i}", Role.WORKER, "h", 1.0, 1, 3.0, model=card, load=Load((50,), kv_bytes_per_s=rate))
        for i, rate in enumerate(bytes_per_s)
    ]


def test_the_median_of_the_measured_bandwidths_and_the_models_kv_are_used() -> None:
    made = completed(pb.PlanStagesRequest(tier="only"), TIER, workers(3e9, 0.0, 1e9, 2e9))
    assert made.bandwidth_bytes_per_second == 2e9
    assert made.kv_bytes_per_token == 114_688


def test_what_a_request_says_stays() -> None:
    asked = pb.PlanStagesRequest(tier="only", bandwidth_bytes_per_second=5e9, kv_bytes_per_token=10.0)
    made = completed(asked, TIER, workers(1e9))
    assert (made.bandwidth_bytes_per_second, made.kv_bytes_per_token) == (5e9, 10.0)


def test_a_bandwidth_that_nobody_knows_is_named() -> None:
    with pytest.raises(InvalidRequest, match="bandwidth_bytes_per_second: missing"):
        completed(pb.PlanStagesRequest(tier="only"), TIER, workers(0.0, 0.0))
