"""What PlanStages takes from a tier's workers where a request leaves it out: bandwidth as measured, KV per token."""

import pytest

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.proto_codec import completed
from services.domain import InstanceRecord, InvalidRequest, Load, ModelCard, Role, TierPlan
from services.domain.stages import QoeModel

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
