"""Converts between the worker's domain types and protobuf messages."""

from penstock.mapper import duration, to_message
from penstock.proto.worker.v1 import worker_pb2 as pb
from penstock.services import proto_codec as common
from penstock.services.domain.errors import invalid
from penstock.services.domain.instances import Load
from penstock.services.domain.stages.bidding import Ask, Bid, RefusalReason
from penstock.types.replies import TokenFrame
from penstock.types.requests import GenerationRequest
from penstock.types.workers import Alive, MoveAdvice
from penstock.worker_service.engine.interface import EngineEvent, EngineInfo

ALIVE = to_message(Alive(), pb.GenerateResponse)


def request_from_proto(request: pb.GenerateRequest) -> GenerationRequest:
    """Raises:
    InvalidRequest: A field is invalid; the error names every one.
    """
    common.check_calls(request.prompt)
    return common.checked(request, GenerationRequest)


def event_to_proto(event: EngineEvent | MoveAdvice) -> pb.GenerateResponse:
    if isinstance(event, TokenFrame):  # by hand: for every token
        return pb.GenerateResponse(tokens=common.frame_to_proto(event))
    return to_message(event, pb.GenerateResponse)


def info_to_proto(info: EngineInfo, tokenizer_digest: str, instance_id: str, tier: str) -> pb.GetInfoResponse:
    return pb.GetInfoResponse(
        instance_id=instance_id,
        tier=tier,
        model=info.model,
        model_digest=info.model_digest,
        engine=info.engine,
        max_context_tokens=info.max_context_tokens,
        kv_block_tokens=info.kv_block_tokens,
        kv_blocks=info.kv_blocks,
        capabilities=sorted(pb.Capability.Value(f"CAPABILITY_{c.name}") for c in info.capabilities),
        tokenizer_digest=tokenizer_digest,
    )


def load_to_proto(load: Load, *, draining: bool, preemptions: int, steps: int) -> pb.GetLoadResponse:
    headroom = None
    if load.slo is not None:
        headroom = pb.SloHeadroom(
            backlog=duration(load.slo.backlog_s),
            prompt_tokens_per_second=load.slo.prompt_tokens_per_s,
            free_kv_tokens=load.slo.free_kv_tokens,
        )
    return pb.GetLoadResponse(
        running_tokens=load.running_tokens,
        queued_tokens=load.queued_tokens,
        free_kv_blocks=load.free_kv_blocks,
        output_tokens_per_second=load.output_tokens_per_s,
        draining=draining,
        preemption_count=preemptions,
        step_count=steps,
        cached_tokens=load.cached_tokens,
        slo_headroom=headroom,
        kv_bytes_per_second=load.kv_bytes_per_s,
    )


def ask_from_proto(request: pb.PlaceBidRequest, path: str = "") -> Ask:
    """Raises:
    InvalidRequest: A field is invalid; the error names it, under `path`.
    """
    for name in ("request_id", "sender_instance_id", "model_digest"):
        if not getattr(request, name):
            raise invalid(path + name, "must not be empty")
    if request.sequence_tokens < 1:
        raise invalid(path + "sequence_tokens", "must be at least 1")
    return Ask(request.request_id, request.sender_instance_id, request.sequence_tokens, request.sender_buffered_tokens)


def bid_to_proto(bid: Bid | RefusalReason, free_kv_blocks: int) -> pb.PlaceBidResponse:
    if isinstance(bid, RefusalReason):
        return pb.PlaceBidResponse(refusal=bid.value)
    earliest_start = duration(bid.earliest_start_s)
    message = pb.Bid(load_tokens=bid.load_tokens, free_kv_blocks=free_kv_blocks, earliest_start=earliest_start)
    return pb.PlaceBidResponse(bid=message)
