"""Replicas: their shape, and one with its measured step times."""

import dataclasses

import numpy as np

from penstock.proto.planner.v1 import planner_pb2 as pb
from planner_service.files import EngineEntry
from planner_service.planning_codec.parts import checked, fields_of, problems_under
from planner_service.simulator import Replica
from services.domain.errors import InvalidRequest, invalid
from services.domain.hardware import ReplicaShape
from services.domain.latency import StepLatencyModel


def shape_from_proto(message: pb.ReplicaGroup | pb.MeasuredReplica, at: str, gpu: str = "") -> ReplicaShape:
    """InvalidRequest names the size that is not positive."""
    sizes = {"tp": message.tp, "pp": message.pp}
    sizes["ep"] = message.ep if message.HasField("ep") else 1
    sizes["attn_dp"] = message.attn_dp if message.HasField("attn_dp") else 1
    for name, size in sizes.items():
        if size < 1:
            raise invalid(f"{at}.{name}", "must be at least 1")
    return ReplicaShape(**sizes, gpu=gpu)


def replica_to_proto(replica: Replica) -> pb.MeasuredReplica:
    latency, limits = replica.latency, replica.limits
    return pb.MeasuredReplica(
        tp=replica.shape.tp,
        pp=replica.shape.pp,
        ep=replica.shape.ep,
        attn_dp=replica.shape.attn_dp,
        kv_tokens=replica.kv_tokens,
        engine=pb.EngineBatch(**dataclasses.asdict(limits)),
        knot_tokens=latency.knot_tokens,
        knot_s=latency.knot_s,
        context_token_s=latency.context_token_s,
        pair_s=latency.pair_s,
        gap_s=latency.gap_s,
    )


def replica_from_proto(m: pb.MeasuredReplica, at: str) -> Replica:
    shape = shape_from_proto(m, at)
    if m.kv_tokens < 1:
        raise invalid(f"{at}.kv_tokens", "must be at least 1")
    if not np.isfinite([*m.knot_tokens, *m.knot_s, m.context_token_s, m.pair_s, m.gap_s]).all():
        raise invalid(at, "step times must be finite")
    try:
        latency = StepLatencyModel(tuple(m.knot_tokens), tuple(m.knot_s), m.context_token_s, m.pair_s, m.gap_s)
    except InvalidRequest as error:
        raise problems_under(at, error) from None
    engine = checked(EngineEntry, fields_of(m.engine), f"{at}.engine")
    return Replica(shape, latency, m.kv_tokens, engine.spec())
