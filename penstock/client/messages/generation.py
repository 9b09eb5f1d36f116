"""Requests, their events and models as protobuf messages."""

from typing import Any

from penstock.client import chat, types
from penstock.client.messages.times import duration, seconds
from penstock.proto.common.v1 import common_pb2
from penstock.proto.router.v1 import router_pb2 as pb

_REASONS = {
    common_pb2.FINISH_REASON_STOP: types.FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: types.FinishReason.LENGTH,
    common_pb2.FINISH_REASON_DECLINED: types.FinishReason.DECLINED,
}

_SLO_CLASSES = {
    common_pb2.SLO_CLASS_STANDARD: "standard",
    common_pb2.SLO_CLASS_BEST_EFFORT: "best_effort",
}

_SLO_FALLBACKS = {
    None: common_pb2.SLO_FALLBACK_UNSPECIFIED,
    "best_effort": common_pb2.SLO_FALLBACK_BEST_EFFORT,
    "decline": common_pb2.SLO_FALLBACK_DECLINE,
}


def request_to_proto(prompt: types.Prompt, options: types.Options) -> pb.GenerateRequest:
    sampling = common_pb2.SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        max_output_tokens=options.max_tokens,
        stop=options.stop,
        top_logprobs_count=options.top_logprobs,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=options.logit_bias,
        min_p=options.min_p,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )
    if options.structured_output is not None:
        sampling.structured_output.CopyFrom(chat.structured_output_to_proto(options.structured_output))
    request = pb.GenerateRequest(
        model=options.model,
        prompt=chat.prompt_to_proto(prompt, options),
        sampling=sampling,
        priority=options.priority,
        request_id=options.request_id,
        prediction=options.prediction,
        cache_salt=options.cache_salt,
    )
    if options.slo is not None:
        request.slo.CopyFrom(slo_to_proto(options.slo))
    return request


def slo_to_proto(slo: types.Slo) -> common_pb2.Slo:
    """Raises:
    ValueError: The fallback is unknown, or there are phases and a pace for the whole answer.
    """
    if slo.fallback not in _SLO_FALLBACKS:
        raise ValueError(f"slo.fallback: must be best_effort or decline, not '{slo.fallback}'")
    if slo.phases and slo.time_per_output_token_s is not None:
        raise ValueError("slo.phases: must not be combined with time_per_output_token_s")
    message = common_pb2.Slo(name=slo.name, fallback=_SLO_FALLBACKS[slo.fallback])
    if slo.time_to_first_token_s is not None:
        message.time_to_first_token.CopyFrom(duration(slo.time_to_first_token_s))
    phases = slo.phases
    if slo.time_per_output_token_s is not None:
        phases = (types.SloPhase(0, slo.time_per_output_token_s),)
    for phase in phases:
        message.phases.add(
            from_output_token_count=phase.from_output_token,
            time_per_output_token=duration(phase.time_per_output_token_s),
            after_marker=phase.after_marker,
        )
    return message


def event_from_proto(response: pb.GenerateResponse) -> types.Event | None:
    """The event; None for a heartbeat, and for an event that is unknown to this version."""
    kind = response.WhichOneof("event")
    event: Any = getattr(response, kind) if kind is not None else None
    match kind:
        case "tokens":
            frame = event.frame
            logprobs = tuple(
                types.PositionLogprobs(_logprob(p.chosen), tuple(_logprob(t) for t in p.top)) for p in frame.logprobs
            )
            return types.Tokens(event.tier, frame.offset, tuple(frame.token_ids), frame.text, logprobs)
        case "accepted":
            step = event.burst_step if event.HasField("burst_step") else None
            return types.Accepted(event.request_id, event.plan_revision, event.seed, step)
        case "tier_started":
            return types.TierStarted(event.tier, event.instance_id)
        case "tier_admitted":
            return types.TierAdmitted(event.tier, event.instance_id, event.slo_kept, _SLO_CLASSES.get(event.slo_class))
        case "tier_declined":
            return types.TierDeclined(event.tier, event.instance_id, event.reason)
        case "judged":
            score = event.score if event.HasField("score") else None
            return types.Judged(
                event.tier,
                score,
                event.threshold,
                event.accepted,
                event.scorer,
                event.reason,
                event.flagged,
                event.better_tier,
            )
        case "escalated":
            reason = pb.EscalationReason.Name(event.reason).removeprefix("ESCALATION_REASON_").lower()
            predicted = event.predicted_score if event.HasField("predicted_score") else None
            return types.Escalated(event.from_tier, event.to_tier, reason, predicted)
        case "instance_changed":
            return types.InstanceChanged(
                event.tier, event.from_instance_id, event.to_instance_id, event.offset, event.reason
            )
        case "finished":
            return types.Finished(
                reason=_REASONS.get(event.reason, types.FinishReason.ABORTED),
                tier=event.tier,
                usage=_usage(event.usage),
                tiers=tuple(_summary(t) for t in event.tiers),
                ttft_s=seconds(event.time_to_first_token) if event.HasField("time_to_first_token") else None,
                total_s=seconds(event.total_time),
                trace_id=event.trace_id,
                tool_calls=chat.calls_from_proto(event.tool_calls),
                content=event.content if event.HasField("content") else None,
                slo=_slo_result(event.slo) if event.HasField("slo") else None,
            )
        case _:
            return None


def heartbeat_interval_s(response: pb.GenerateResponse) -> float | None:
    """The router's longest time between two messages of a stream, if the response announces it."""
    match response.WhichOneof("event"):
        case "heartbeat" if response.heartbeat.HasField("interval"):
            return seconds(response.heartbeat.interval)
        case "accepted" if response.accepted.HasField("heartbeat_interval"):
            return seconds(response.accepted.heartbeat_interval)
        case _:
            return None


def model_from_proto(model: pb.Model) -> types.Model:
    return types.Model(model.id, model.model, model.cascade, model.max_context_tokens)


def _slo_result(slo: pb.SloResult) -> types.SloResult:
    late_s = seconds(slo.first_token_late) if slo.HasField("first_token_late") else None
    return types.SloResult(
        _SLO_CLASSES.get(slo.slo_class), slo.attained, late_s, slo.window_count, slo.late_window_count
    )


def _usage(usage: common_pb2.TokenUsage) -> types.Usage:
    return types.Usage(
        usage.prompt_tokens,
        usage.cached_prompt_tokens,
        usage.output_tokens,
        usage.accepted_draft_tokens,
        usage.rejected_draft_tokens,
    )


def _logprob(value: common_pb2.TokenLogprob) -> types.TokenLogprob:
    return types.TokenLogprob(value.token_id, value.logprob, value.token_bytes)


def _summary(t: pb.TierSummary) -> types.TierSummary:
    return types.TierSummary(
        tier=t.tier,
        model=t.model,
        instance_id=t.instance_id,
        score=t.score if t.HasField("score") else None,
        threshold=t.threshold if t.HasField("threshold") else None,
        accepted=t.accepted,
        usage=_usage(t.usage),
        time_s=seconds(t.time),
        score_reason=t.score_reason,
        flagged=t.flagged,
    )
