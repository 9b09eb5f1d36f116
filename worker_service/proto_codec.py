"""Converts between the worker's domain types and protobuf messages."""

from penstock.proto.worker.v1 import worker_pb2 as pb
from services import proto_codec as common
from services.domain.errors import invalid
from services.domain.instances import Load
from services.domain.requests import MAX_DRAFT_TOKENS, Draft, GenerationRequest, TokenFrame
from services.domain.stages.advice import MoveAdvice
from services.domain.stages.bidding import Ask, Bid, RefusalReason
from worker_service.engine.interface import (
    Admitted,
    Capability,
    Declined,
    DraftDistribution,
    EngineEvent,
    EngineInfo,
    HandedOver,
    KvLayout,
)
from worker_service.migration.messages import (
    Chunk,
    Closing,
    MovedOut,
    Opening,
    Report,
    RoundCopied,
    SegmentAddress,
    ToSource,
    ToTarget,
)
from worker_service.migration.source import Accepted, Committed, Failed, Received

_CAPABILITIES = {
    Capability.LOGPROBS: pb.CAPABILITY_LOGPROBS,
    Capability.PREFIX_REUSE: pb.CAPABILITY_PREFIX_REUSE,
    Capability.TOKEN_ALLOCATION: pb.CAPABILITY_TOKEN_ALLOCATION,
    Capability.KV_TRANSFER: pb.CAPABILITY_KV_TRANSFER,
    Capability.VERIFY_GREEDY: pb.CAPABILITY_VERIFY_GREEDY,
    Capability.VERIFY_SAMPLED: pb.CAPABILITY_VERIFY_SAMPLED,
    Capability.VERIFY_REJECTION: pb.CAPABILITY_VERIFY_REJECTION,
    Capability.SEEDED_SAMPLING: pb.CAPABILITY_SEEDED_SAMPLING,
    Capability.PRIORITIES: pb.CAPABILITY_PRIORITIES,
    Capability.PREFIX_TRANSFER: pb.CAPABILITY_PREFIX_TRANSFER,
    Capability.STRUCTURED_OUTPUT: pb.CAPABILITY_STRUCTURED_OUTPUT,
    Capability.SLO: pb.CAPABILITY_SLO,
    Capability.DRAFTS: pb.CAPABILITY_DRAFTS,
    Capability.SLO_PREDICTED: pb.CAPABILITY_SLO_PREDICTED,
    Capability.ADAPTER: pb.CAPABILITY_ADAPTER,
}

HEARTBEAT = pb.GenerateResponse(heartbeat=pb.Heartbeat())


def request_from_proto(request: pb.GenerateRequest) -> GenerationRequest:
    """Raises:
    InvalidRequest: A field is invalid; the error names every one.
    """
    generation = GenerationRequest(
        request_id=request.request_id,
        prompt=common.prompt_from_proto(request.prompt),
        sampling=common.sampling_from_proto(request.sampling),
        resume_token_ids=common.token_ids_from_proto(request.resume_token_ids, "resume_token_ids"),
        slo=common.slo_from_proto(request.slo) if request.HasField("slo") else None,
        priority=request.priority,
        decline_unkept_slo=request.decline_unkept_slo,
        cache_salt=request.cache_salt,
        draft=_draft_from_proto(request.draft) if request.HasField("draft") else None,
        output_interval_s=(
            common.seconds(request.output_interval, "output_interval") if request.HasField("output_interval") else None
        ),
    )
    generation.validate()
    return generation


def _draft_from_proto(draft: pb.Draft) -> Draft:
    """Tokens beyond the limit are not converted, except one, by which the draft is refused."""
    ids = draft.token_ids.ids[: MAX_DRAFT_TOKENS + 1]
    return Draft(draft.text, common.token_ids_from_proto(ids, "draft.token_ids.ids"), draft.tokenizer_digest)


def event_to_proto(event: EngineEvent) -> pb.GenerateResponse:
    match event:
        case TokenFrame():
            return pb.GenerateResponse(tokens=common.frame_to_proto(event))
        case Admitted():
            service_class = pb.SERVICE_CLASS_BEST_EFFORT if event.best_effort else pb.SERVICE_CLASS_STANDARD
            admitted = pb.Admitted(
                service_class=service_class,
                prompt_tokens=event.prompt_tokens,
                max_output_tokens=event.max_output_tokens,
            )
            return pb.GenerateResponse(admitted=admitted)
        case Declined():
            return pb.GenerateResponse(declined=pb.Declined(reason=event.reason))
        case HandedOver():
            return pb.GenerateResponse(handed_over=pb.HandedOver(offset=event.offset))
        case _:
            finished = pb.Finished(
                reason=common.finish_reason_to_proto(event.reason),
                usage=common.usage_to_proto(event.usage),
                stop=event.stop,
                preemption_count=event.preemptions,
            )
            return pb.GenerateResponse(finished=finished)


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
        capabilities=sorted(_CAPABILITIES[c] for c in info.capabilities),
        tokenizer_digest=tokenizer_digest,
    )


def load_to_proto(load: Load, *, draining: bool, preemptions: int, steps: int) -> pb.GetLoadResponse:
    headroom = None
    if load.slo is not None:
        headroom = pb.SloHeadroom(
            backlog=common.duration(load.slo.backlog_s),
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


def distributions_from_proto(request: pb.VerifyRequest) -> list[DraftDistribution]:
    return [DraftDistribution(tuple(d.token_ids), tuple(d.probabilities)) for d in request.draft_distributions]


def advice_to_proto(advice: MoveAdvice) -> pb.GenerateResponse:
    return pb.GenerateResponse(move_advice=common.move_advice_to_proto(advice))


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
    message = pb.Bid(load_tokens=bid.load_tokens, free_kv_blocks=free_kv_blocks)
    message.earliest_start.CopyFrom(common.duration(bid.earliest_start_s))
    return pb.PlaceBidResponse(bid=message)


def report_to_proto(report: Report) -> pb.MigrateOutResponse:
    match report:
        case RoundCopied():
            copied = pb.RoundCopied(round=report.round, blocks=report.blocks, sent_bytes=report.sent_bytes)
            return pb.MigrateOutResponse(round_copied=copied)
        case MovedOut():
            moved = pb.HandedOver(offset=report.offset, stall=common.duration(report.stall_s))
            return pb.MigrateOutResponse(handed_over=moved)
        case _:
            return pb.MigrateOutResponse(transfer_failed=pb.TransferFailed(reason=report.reason, busy=report.busy))


def to_target_to_proto(message: ToTarget) -> pb.MigrateInRequest:
    match message:
        case Opening():
            layout = message.layout
            kv_layout = pb.KvLayout(
                model_digest=layout.model_digest,
                layers=layout.layers,
                kv_heads=layout.kv_heads,
                head_dim=layout.head_dim,
                block_tokens=layout.block_tokens,
                dtype=layout.dtype,
            )
            opening = pb.TransferOpening(
                transfer_id=message.transfer_id,
                layout=kv_layout,
                token_ids=message.tokens,
                shared_segment=None if message.shared is None else _segment_to_proto(message.shared),
                measurement=message.measurement,
            )
            return pb.MigrateInRequest(opening=opening)
        case Chunk():
            request = pb.MigrateInRequest()
            _set_chunk(request.chunk, message)
            return request
        case _:
            request = pb.MigrateInRequest(closing=pb.TransferClosing(token_ids=message.tokens))
            if message.last is not None:
                _set_chunk(request.closing.last, message.last)
            return request


def to_target_from_proto(message: pb.MigrateInRequest) -> ToTarget:
    """Raises:
    InvalidRequest: The message has no step.
    """
    match message.WhichOneof("step"):
        case "opening":
            layout_message = message.opening.layout
            layout = KvLayout(
                layout_message.model_digest,
                layout_message.layers,
                layout_message.kv_heads,
                layout_message.head_dim,
                layout_message.block_tokens,
                layout_message.dtype,
            )
            opening = message.opening
            shared = _segment_from_proto(opening.shared_segment) if opening.HasField("shared_segment") else None
            return Opening(opening.transfer_id, layout, tuple(opening.token_ids), shared, opening.measurement)
        case "chunk":
            return _chunk_from_proto(message.chunk)
        case "closing":
            last = _chunk_from_proto(message.closing.last) if message.closing.HasField("last") else None
            return Closing(tuple(message.closing.token_ids), last)
        case _:
            raise invalid("step", "is missing")


def _set_chunk(proto: pb.KvChunk, chunk: Chunk) -> None:
    """Fill in place: a message that is given to the constructor of another one is copied, with its data."""
    proto.first_block, proto.blocks = chunk.first_block, chunk.blocks
    if chunk.shared_offset is None:
        proto.data = chunk.data
    else:
        proto.shared_offset = chunk.shared_offset


def _chunk_from_proto(chunk: pb.KvChunk) -> Chunk:
    shared = chunk.HasField("shared_offset")
    return Chunk(chunk.first_block, chunk.blocks, chunk.data, chunk.shared_offset if shared else None)


def _segment_to_proto(address: SegmentAddress) -> pb.SharedSegment:
    return pb.SharedSegment(
        process_id=address.process_id,
        descriptor=address.descriptor,
        size_bytes=address.size_bytes,
        secret=address.secret,
    )


def _segment_from_proto(segment: pb.SharedSegment) -> SegmentAddress:
    return SegmentAddress(segment.process_id, segment.descriptor, segment.size_bytes, segment.secret)


def to_source_to_proto(answer: ToSource) -> pb.MigrateInResponse:
    match answer:
        case Accepted():
            accepted = pb.TransferAccepted(present_blocks=answer.present, shares_segment=answer.shares_segment)
            return pb.MigrateInResponse(accepted=accepted)
        case Received():
            return pb.MigrateInResponse(chunk_received=pb.ChunkReceived(blocks=answer.blocks))
        case Committed():
            return pb.MigrateInResponse(committed=pb.TransferCommitted())
        case _:
            return pb.MigrateInResponse(refusal=answer.reason)


def to_source_from_proto(answer: pb.MigrateInResponse) -> ToSource:
    match answer.WhichOneof("event"):
        case "accepted":
            return Accepted(answer.accepted.present_blocks, answer.accepted.shares_segment)
        case "chunk_received":
            return Received(answer.chunk_received.blocks)
        case "committed":
            return Committed()
        case _:
            return Failed(answer.refusal)
